"""The job file: what is accepted, how layers win over each other, and what errors say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mayfly.errors import UserError
from mayfly.spec import (
    ClusterSpec,
    GitSource,
    collection_name,
    environment_settings,
    json_schema,
    load_spec,
    parse_assignment,
    parse_budget,
    parse_duration,
    parse_git,
    s3_uri,
    split_s3_uri,
)

LOCAL = {"cloud": "local"}


def load(**settings: object) -> ClusterSpec:
    """The default job on the local cloud; two underscores stand for a dot."""
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return load_spec(None, {**LOCAL, **overrides}, {})


def error(
    file: Path | None = None, environ: dict[str, str] | None = None, **settings: object
) -> str:
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    with pytest.raises(UserError) as caught:
        load_spec(file, {**LOCAL, **overrides}, environ or {})
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def job(directory: Path, text: str) -> Path:
    file = directory / "job.yml"
    file.write_text(text, encoding="utf-8")
    return file


# --- precedence -------------------------------------------------------------------------------


def test_the_default_job_says_what_its_data_is():
    spec = load()
    assert spec.name.startswith("fashion-mnist")
    assert "fashion-mnist" in spec.data.source
    assert spec.trainer.steps >= 1000
    assert spec.trainer.batch_size == 128


def test_flags_win_over_the_file_over_the_environment_over_defaults(tmp_path):
    environ = {"MAYFLY_STEPS": "1", "MAYFLY_WORKERS": "1", "MAYFLY_MODE": "sync"}
    file = job(tmp_path, "trainer: {steps: 2}\nnodes: {worker: {count: 2}}\n")
    spec = load_spec(file, {**LOCAL, "steps": 3}, environ)
    assert (spec.trainer.steps, spec.count("worker"), spec.trainer.mode) == (3, 2, "sync")
    assert spec.count("ps") == 1


def test_the_environment_wins_over_the_default_job():
    spec = load_spec(None, LOCAL, {"MAYFLY_STEPS": "7", "MAYFLY_BUCKET": "models"})
    assert spec.trainer.steps == 7
    assert spec.model.destination == "s3://models/"


def test_a_job_file_replaces_the_default_job(tmp_path):
    spec = load_spec(job(tmp_path, "name: mine\n"), LOCAL, {})
    assert spec.name == "mine"


def test_settings_that_are_not_given_change_nothing():
    assert load(workers=None, trainer__steps=None) == load()


def test_a_setting_of_one_key_keeps_its_neighbours(tmp_path):
    file = job(tmp_path, "trainer: {steps: 5, args: {a: 1, b: 2}}\n")
    spec = load_spec(file, {**LOCAL, "trainer.args.b": 3}, {})
    assert spec.trainer.args == {"a": 1, "b": 3}
    assert spec.trainer.steps == 5


def test_an_empty_variable_is_not_a_setting():
    assert environment_settings({"MAYFLY_CLOUD": "", "MAYFLY_STEPS": "3", "CLOUD": "x"}) == {
        "steps": "3"
    }


def test_a_spec_survives_json():
    spec = load(limits__budget="5 USD", trainer__args__sizes=[1, 2]).in_bucket("mayfly")
    assert ClusterSpec.model_validate(json.loads(spec.model_dump_json())) == spec


# --- what is wrong ----------------------------------------------------------------------------


def test_no_workers():
    message = error(workers=0)
    assert "nodes.worker.count is 0 (from the command line)" in message
    assert "at least one worker" in message


def test_no_parameter_server():
    assert "at least one parameter server" in error(ps=0)


# --- engine torch -----------------------------------------------------------------------------


def test_the_engines_own_default_job_runs_without_a_file():
    spec = load(engine="torch")
    assert (spec.count("ps"), spec.count("worker"), spec.trainer.mode) == (0, 2, "sync")
    assert spec.trainer.program == "builtin:mnist_lightning"
    assert spec.data.source.endswith("fashion-mnist-idx/")
    assert (spec.trainer.batch_size, spec.trainer.steps) == (64, 9370)
    assert load_spec(None, LOCAL, {"MAYFLY_ENGINE": "torch"}) == spec


def test_a_job_file_that_names_the_engine_needs_no_more(tmp_path):
    file = job(tmp_path, "trainer: {engine: torch, steps: 100}\ndata: {format: files}\n")
    spec = load_spec(file, LOCAL, {})
    assert (spec.count("ps"), spec.trainer.mode) == (0, "sync")
    assert spec.trainer.program == "builtin:mnist_lightning"


def test_torch_has_no_parameter_servers_and_is_synchronous(tmp_path):
    assert "nodes.ps.count is 1 (from the command line) — must be 0" in error(engine="torch", ps=1)
    message = error(engine="torch", mode="async")
    assert "trainer.mode is 'async' (from the command line) — must be 'sync'" in message


@pytest.mark.parametrize("steps", [-1, 0, "-3"])
def test_steps_that_are_not_positive(steps):
    assert "must be 1 or more" in error(steps=steps)


@pytest.mark.parametrize("value", ["two", 2.5, "2.5", "1e3"])
def test_a_count_that_is_no_whole_number(value):
    assert "whole number" in error(workers=value)


@pytest.mark.parametrize(
    ("text", "place", "guess"),
    [
        ("trainr: {}\n", "unknown key 'trainr'", "'trainer'"),
        ("trainer: {step: 4}\n", "unknown key 'step' in trainer", "'steps'"),
        ("nodes: {workers: {count: 1}}\n", "unknown key 'workers' in nodes", "'worker'"),
        ("nodes: {worker: {cuont: 1}}\n", "unknown key 'cuont' in nodes.worker", "'count'"),
        ("limits: {max_duraton: 4h}\n", "unknown key 'max_duraton' in limits", "'max_duration'"),
    ],
)
def test_a_misspelt_key_names_the_nearest(tmp_path, text, place, guess):
    message = error(job(tmp_path, text))
    assert place in message
    assert f"did you mean {guess}?" in message
    assert "job.yml" in message


def test_a_key_like_no_other_lists_the_known_ones(tmp_path):
    message = error(job(tmp_path, "store: hdfs\nqqq: 1\n"))
    assert "known keys:" in message
    assert "trainer" in message


def test_an_unknown_key_comes_before_other_mistakes(tmp_path):
    assert "unknown key" in error(job(tmp_path, "name: '!'\ntrainer: {stepz: 1}\n"))


def test_no_cloud():
    with pytest.raises(UserError, match="cloud is not set"):
        load_spec(None, {}, {})


def test_a_misspelt_engine():
    assert "did you mean 'estimator'?" in error(engine="estimatr")


def test_a_misspelt_mode():
    assert "'async' or 'sync'" in error(mode="asink")


@pytest.mark.parametrize("name", ["Big", "a b", "-x", "9x", "", "x" * 30])
def test_names_that_cannot_start_a_run_id(name):
    assert "29 at most" in error(name=name)


def test_a_job_file_that_is_not_there(tmp_path):
    assert "No such file" in error(tmp_path / "none.yml")


def test_a_job_file_that_is_not_yaml_names_the_line(tmp_path):
    assert "line 2" in error(job(tmp_path, "name: x\n\ttrainer: {}\n"))


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n", "1: 2\n"])
def test_a_job_file_that_is_no_mapping(tmp_path, text):
    assert "not a mapping" in error(job(tmp_path, text))


def test_binary_is_no_job_file(tmp_path):
    file = tmp_path / "job.yml"
    file.write_bytes(b"\xff\xfe\x00")
    assert "not YAML" in error(file)


def test_a_group_that_is_no_mapping(tmp_path):
    assert "trainer is 'fast'" in error(job(tmp_path, "trainer: fast\n"))


def test_where_a_value_came_from(tmp_path):
    file = job(tmp_path, "name: x\n")
    assert "(from the environment)" in error(file, environ={"MAYFLY_MODE": "x"})


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("20m", 1200), ("4h", 14400), ("1h30m", 5400), ("2d", 172800), (45, 45)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "4", "h", "4 hours", "-1h", "0m", 0, -5, True, None, "1m1h"])
def test_things_that_are_no_duration(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_a_budget():
    spec = load(limits__budget="5.50 USD")
    assert spec.limits.budget is not None
    assert (spec.limits.budget.amount, spec.limits.budget.currency) == (5.5, "USD")
    assert str(spec.limits.budget) == "5.5 USD"


@pytest.mark.parametrize("text", ["5", "USD 5", "-5 USD", "0 USD", "5 dollars", ""])
def test_things_that_are_no_budget(text):
    with pytest.raises(ValueError, match="such as 5 USD"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("my-models", "s3://my-models/"),
        ("my-models/a/b", "s3://my-models/a/b/"),
        ("s3://my.models", "s3://my.models/"),
        ("s3://my-models/runs/", "s3://my-models/runs/"),
        ("s3://my-models/dt=2026-11-28/", "s3://my-models/dt=2026-11-28/"),
    ],
)
def test_s3_uris(text, uri):
    assert s3_uri(text) == uri


@pytest.mark.parametrize(
    "text",
    ["", "ab", "s3://", "s3://A-Bucket", "S3://bucket", "https://bucket/x", "s3://my_bucket/"]
    + ["s3://buc..ket/", "s3://-bucket/", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/a b"]
    + ["s3://bucket/'x", "s3://bucket/a\nb", "s3://bucket/{{x}}", "s3://" + "x" * 64],
)
def test_things_that_are_no_s3_uri(text):
    with pytest.raises(ValueError, match="write"):
        s3_uri(text)


def test_the_parts_of_an_s3_uri():
    assert split_s3_uri("s3://bucket/a/b/") == ("bucket", "a/b/")
    assert split_s3_uri("s3://bucket/") == ("bucket", "")


@pytest.mark.parametrize(
    ("program", "url", "ref"),
    [
        ("git+https://host/a/b.git", "https://host/a/b.git", ""),
        ("git+https://host:8443/a/b@v1.2", "https://host:8443/a/b", "v1.2"),
        ("git+http://10.0.0.1:8333/x.git@feature/y", "http://10.0.0.1:8333/x.git", "feature/y"),
        ("git+ssh://git@host/a.git@main", "ssh://git@host/a.git", "main"),
        ("git+ssh://git@host/a.git", "ssh://git@host/a.git", ""),
        ("git+file:///srv/a.git@main", "file:///srv/a.git", "main"),
    ],
)
def test_git_programs(program, url, ref):
    assert parse_git(program) == GitSource(url, ref)


@pytest.mark.parametrize(
    "program",
    ["https://host/a", "git+host/a", "git+https://host", "git+https://host/a@", "cifar10", ""]
    + ["git+https://host/a b", "git+https://host/a@-x", "git+ftp://host/a", "git+https://h/a'b"],
)
def test_things_that_are_no_git_program(program):
    with pytest.raises(ValueError, match="write builtin:NAME"):
        parse_git(program)


@pytest.mark.parametrize("user", ["token@", "user:pass@"])
def test_credentials_in_a_url_are_refused_and_not_shown(user):
    program = f"git+https://{user}host/a"
    message = error(trainer__program=program, trainer__entrypoint="a.py")
    assert "credentials" in message
    assert user not in message


def test_a_git_program_needs_an_entrypoint():
    assert "entrypoint is missing" in error(trainer__program="git+https://host/a")


def test_a_builtin_program_has_no_entrypoint():
    assert "entrypoint goes with" in error(trainer__entrypoint="a.py")


@pytest.mark.parametrize("path", ["/etc/x.py", "../x.py", "a/../../x.py", "x;y.py", "x'.py"])
def test_paths_that_leave_the_repository(path):
    program = "git+https://host/a"
    assert "repository" in error(trainer__program=program, trainer__entrypoint=path)


@pytest.mark.parametrize("value", ["{{ secret }}", "{% x %}", "a\nb", "@input.s3_access_key_id@"])
def test_arguments_that_nodes_or_clients_would_expand(value):
    assert "trainer.args" in error(trainer__args__x=value)
    assert "trainer.args" in error(trainer__args__x=[1, value])


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], [{"a": 1}]])
def test_arguments_that_are_no_plain_values(value):
    assert "must be text, a number" in error(trainer__args__x=value)


@pytest.mark.parametrize("value", [0, -1, "many", True, 1.5])
def test_batch_sizes_that_are_none(value):
    assert "batch_size" in error(trainer__args__batch_size=value)


def test_batch_size_is_read_from_the_arguments():
    assert load(trainer__args__batch_size=32).trainer.batch_size == 32


# --- buckets ----------------------------------------------------------------------------------


def test_a_relative_source_lies_in_the_bucket_of_the_model():
    spec = load(bucket="s3://models/x/", data__source="sets/a").in_bucket("other")
    assert spec.data.source == "s3://models/sets/a/"
    assert spec.model.destination == "s3://models/x/"


def test_the_clouds_own_bucket_is_the_default():
    spec = load().in_bucket("mayfly")
    assert spec.model.destination == "s3://mayfly/"
    assert spec.data.source.startswith("s3://mayfly/")


def test_no_bucket_at_all_is_named():
    with pytest.raises(UserError, match="MAYFLY_BUCKET"):
        load().in_bucket(None)


# --- flags and schema -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("trainer.steps=20", ("trainer.steps", 20)),
        ("trainer.args.sizes=[1, 2]", ("trainer.args.sizes", [1, 2])),
        ("data.source=s3://b/x=1/", ("data.source", "s3://b/x=1/")),
    ],
)
def test_assignments(text, pair):
    assert parse_assignment(text) == pair


@pytest.mark.parametrize("text", ["steps", "=3", "a=", "a=[1"])
def test_things_that_are_no_assignment(text):
    with pytest.raises(UserError, match="--set"):
        parse_assignment(text)


def test_every_key_of_the_schema_is_described():
    schema = json_schema()
    groups = [schema, *schema["$defs"].values()]
    fields = [(name, field) for group in groups for name, field in group["properties"].items()]
    assert len(fields) > 20
    assert [name for name, field in fields if not field.get("description")] == []


# --- engines: what goes with what --------------------------------------------------------------


def test_a_command_is_words_or_text_for_bash():
    assert load(engine="command", trainer__command=["a", "b c"]).trainer.command == ("a", "b c")
    words = load(engine="command", trainer__command="echo $RANK\n./train\n").trainer.command
    assert words == ("bash", "-e", "-o", "pipefail", "-c", "echo $RANK\n./train")


@pytest.mark.parametrize("command", ["", " ", [], [1], {"a": 1}, "echo {{ x }}", "a\x07"])
def test_commands_that_are_none(command):
    assert "trainer.command" in error(engine="command", trainer__command=command)


def test_a_line_of_a_command_must_not_end_the_radl():
    assert "ends a block of RADL" in error(engine="command", trainer__command="a\n @end\n")


def test_a_command_goes_with_its_engine():
    assert "command goes with engine command" in error(engine="torch", trainer__command="ls")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "tf-server", "ps": 0}, "must be 1 or more: engine tf-server needs"),
        ({"trainer__framework": "torch"}, "the last release with tf.estimator"),
        ({"trainer__framework": "jax"}, "must be 'tensorflow'"),
        ({"trainer__program": "builtin:mnist_lightning"}, "is written for engine torch"),
        (
            {"engine": "torch", "trainer__program": "builtin:cifar10"},
            "use builtin:mnist_lightning or builtin:cifar10_torch, or a program of your own",
        ),
    ],
)
def test_what_does_not_go_with_the_engine(settings, message):
    assert message in error(**settings)


def test_the_environment_is_text():
    spec = load(trainer__environment={"MAYFLY_MIN_NODES": 2, "DEBUG": True})
    assert spec.trainer.environment == {"MAYFLY_MIN_NODES": "2", "DEBUG": "True"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"A-B": 1}, "is not a variable's name"),
        ({"AWS_SECRET_ACCESS_KEY": "x"}, "looks like a secret"),
        ({"HF_TOKEN": "x"}, "looks like a secret"),
        ({"A": [1]}, "must be text, a number"),
        ({"A": "{{ x }}"}, "nodes would expand it"),
        (["A"], "must be a mapping"),
    ],
)
def test_environments_that_are_refused(environment, message):
    assert message in error(trainer__environment=environment)


# --- preprocessing ----------------------------------------------------------------------------


def test_preprocessing_is_off_unless_it_is_asked_for():
    assert load().data.preprocess is None
    spec = load(engine="horovod", data__preprocess__to="tensors", workers=3)
    assert (spec.data.preprocess.to, spec.data.preprocess.normalise) == ("tensors", [])
    assert spec.shards == 12
    assert load(engine="torch", workers=1).shards == 8
    given = load(
        engine="horovod",
        data__preprocess={"to": "tensors", "shards": 3, "mean": 0.5, "std": "0.25"},
    )
    assert (given.shards, given.data.preprocess.normalise) == (3, [0.5, 0.25])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "csv"}, "data.preprocess.to is 'csv'"),
        ({"shards": 4}, "data.preprocess.to is not set — add it to the job file"),
        ({"to": "tensors", "shards": 0}, "data.preprocess.shards is 0"),
        ({"to": "tensors", "shards": 1.5}, "must be a whole number"),
        ({"to": "tensors", "mean": 0.1}, "mean and std go together: give both or neither"),
        ({"to": "tensors", "mean": 0, "std": 0}, "must be above 0"),
        ({"to": "tensors", "mean": float("nan"), "std": 1}, "data.preprocess.mean is nan"),
        ({"to": "tensors", "image_size": 0}, "must be 1 or more"),
        ({"to": "tensors", "shard": 1}, "unknown key 'shard' in data.preprocess"),
        ({"to": "tensors", "shard": 1}, "did you mean 'shards'?"),
        ({"to": "tfrecord"}, "builtin:mnist_horovod_keras reads tensors: write tensors"),
    ],
)
def test_preprocessing_that_cannot_be_done_is_refused(settings, message):
    assert message in error(engine="horovod", data__preprocess=settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "(from the default job) — must be 'files': data.preprocess"),
        ({"data__format": "files"}, "builtin:cifar10 reads tfrecord: write tfrecord"),
        ({"engine": "mwms"}, "reads nothing that is preprocessed: leave data.preprocess out"),
        ({"engine": "keras-ps"}, "reads nothing that is preprocessed: leave data.preprocess out"),
    ],
)
def test_results_that_the_program_cannot_read_are_refused(settings, message):
    assert message in error(data__preprocess={"to": "tensors"}, **settings)


def test_programs_that_scale_pixels_themselves_get_bytes():
    wanted = {"to": "tfrecord", "mean": 0.5, "std": 0.5}
    says = error(data__format="files", data__preprocess=wanted)
    assert "leave mean and std out: builtin:cifar10 reads bytes" in says


def test_programs_of_ones_own_may_read_anything():
    own = {"trainer__program": "git+https://h.org/r", "trainer__entrypoint": "t.py"}
    assert load(engine="mwms", data__preprocess={"to": "tfrecord"}, **own).data.preprocess
    assert load(engine="command", data__preprocess={"to": "tfrecord"}).data.preprocess


# --- the collection ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("1.2.0", "mayfly.training,1.2.0"),
        ("1.2.0-rc.1", "mayfly.training,1.2.0-rc.1"),
        ("git+https://host/a/b.git@v1.2.0", "git+https://host/a/b.git,v1.2.0"),
        ("https://host:8443/a/b-1.2.0.tar.gz", "https://host:8443/a/b-1.2.0.tar.gz"),
    ],
)
def test_a_collection_is_named_as_im_installs_any(written, name):
    assert collection_name(written) == name
    assert load_spec(None, {"cloud": "aws", "collection": written}, {}).collection == written


@pytest.mark.parametrize(
    "written",
    ["1.2", "latest", "mayfly.training", "git+https://host/a", "git+https://host/a,b@v1"]
    + ["https://host/a.zip", "https://host/a.tar.gz?X-Amz-Signature=0a", "https://u:p@h/a.tar.gz"]
    + ["git+https://user:pass@host/a@v1", "https://host/a'b.tar.gz"],
)
def test_what_names_no_collection_is_refused(written):
    assert "collection" in error(collection=written)
