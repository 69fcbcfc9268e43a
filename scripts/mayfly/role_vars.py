"""What the job file decides about the roles: one mapping, and each block's share of it.

Only what a job or a cloud decides is here; all else is the roles' own defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mayfly import inputs
from mayfly.clouds import load_cloud
from mayfly.engines import HOROVOD
from mayfly.juicefs import MODEL_DIR, MOUNT_POINT, store_name
from mayfly.run import Run
from mayfly.spec import JUICEFS, ClusterSpec, parse_git, split_s3_uri

# Between the timer and the first sign of life of a task lies all that IM's contextualization does,
# which it ends after two hours.
SILENCE_S = 7200 + 600
# What comes after training, however long that took: the last evaluation, and export.
MARGIN_S = 1800
LEAST_S = 60  # what role deadman accepts


def role_vars(spec: ClusterSpec, run: Run) -> dict[str, Any]:
    """The roles' variables for a run, by their full names; secrets are `@input.…@` placeholders."""
    return {
        **deadman(spec, run),
        **_juicefs(spec, run),
        "dataset_source": spec.data.source,
        "dataset_run_uri": run.uri(spec),
        **gpus(spec),
        **_preprocess(spec),
        **s3("dataset", run),
        "runtime_framework": spec.trainer.runtime,
        **({"horovod_framework": spec.trainer.runtime} if spec.trainer.engine == HOROVOD else {}),
        **_trainer(spec, run),
        "model_export_run_uri": run.uri(spec),
        **s3("model_export", run),
    }


def share(variables: dict[str, Any], roles: Iterable[str]) -> dict[str, Any]:
    """The variables whose names begin with the name of one of the roles, in their order."""
    prefixes = tuple(f"{role}_" for role in roles)
    return {name: value for name, value in variables.items() if name.startswith(prefixes)}


def deadman(spec: ClusterSpec, run: Run) -> dict[str, Any]:
    """Kept nodes are for the user to look at, so only the longest limit ends them."""
    longest = SILENCE_S + spec.limits.max_duration + MARGIN_S
    paid = None if run.end_s is None else max(run.end_s, LEAST_S)
    longest = longest if paid is None else min(longest, paid)
    return {
        "deadman_run": run.id,
        "deadman_max_s": longest,
        "deadman_linger_s": longest if run.keep else min(longest, spec.limits.idle),
        "deadman_silence_s": longest if run.keep else min(longest, SILENCE_S),
        # The other limits count from when the timer is armed, which is not when the bill begins.
        **({"deadman_age_s": paid} if paid else {}),
    }


def gpus(spec: ClusterSpec) -> dict[str, Any]:
    """What nodes must prove to have, lest paid GPUs lie idle while their node's CPU trains.

    A job may name GPUs where no node can have any (`local`): the plan says that they are ignored.
    """
    if load_cloud(spec.cloud).gpu == "none":
        return {}
    wanted = {"gpu_ps_count": spec.nodes.ps.gpu, "gpu_worker_count": spec.nodes.worker.gpu}
    return {name: count for name, count in wanted.items() if count}


def _juicefs(spec: ClusterSpec, run: Run) -> dict[str, Any]:
    """Nothing for a run whose model is in HDFS: the role then does nothing."""
    if spec.store != JUICEFS:
        return {}
    bucket, _ = split_s3_uri(str(spec.model.destination))
    return {
        "juicefs_name": store_name(run.id),
        "juicefs_bucket": bucket,
        **s3("juicefs", run),
        "juicefs_redis_password": inputs.placeholder(inputs.STORE_PASSWORD),
        "juicefs_mount_point": MOUNT_POINT,
    }


def _trainer(spec: ClusterSpec, run: Run) -> dict[str, Any]:
    trainer = spec.trainer
    return {
        "trainer_run": run.id,
        "trainer_run_uri": run.uri(spec),
        "trainer_engine": trainer.engine,
        "trainer_mode": trainer.mode,
        "trainer_steps": trainer.steps,
        "trainer_batch_size": trainer.batch_size,
        **({"trainer_model_dir": MODEL_DIR} if spec.store == JUICEFS else {}),
        **_program(spec),
        **({"trainer_command": list(trainer.command)} if trainer.command else {}),
        **({"trainer_environment": trainer.environment} if trainer.environment else {}),
        "trainer_args": trainer.args,
        "trainer_max_duration_s": spec.limits.max_duration,
        **({"trainer_budget_s": run.train_s} if run.train_s else {}),
        "trainer_idle_s": spec.limits.idle,
        "trainer_tensorboard": spec.tensorboard,
    }


def _preprocess(spec: ClusterSpec) -> dict[str, Any]:
    """What the nodes convert the data to; they need further packages for it."""
    wanted = spec.data.preprocess
    if wanted is None:
        return {}
    return {
        "agent_convert": True,
        "dataset_preprocess_to": wanted.to,
        "dataset_preprocess_shards": spec.shards,
        "dataset_preprocess_normalise": wanted.normalise,
        "dataset_preprocess_image_size": wanted.image_size,
        "trainer_data_dir": data_dir(spec),
    }


def data_dir(spec: ClusterSpec) -> str:
    """The directory in HDFS that a program reads its data from."""
    return "/mayfly/preprocessed" if spec.data.preprocess else "/mayfly/data"


def _program(spec: ClusterSpec) -> dict[str, Any]:
    trainer = spec.trainer
    if trainer.program.startswith("builtin:"):
        return {"trainer_program": trainer.program}
    source = parse_git(trainer.program)
    return {
        "trainer_program": f"git+{source.url}" + (f"@{source.ref}" if source.ref else ""),
        "trainer_directory": trainer.directory,
        "trainer_entrypoint": trainer.entrypoint or "",
    }


def s3(role: str, run: Run) -> dict[str, Any]:
    """What a role with S3 settings of its own is told; keys are placeholders."""
    settings: dict[str, Any] = {
        "s3_endpoint": run.s3_endpoint or "",
        "s3_region": run.s3_region,
        "s3_access_key_id": inputs.placeholder(inputs.S3_ACCESS_KEY_ID),
        "s3_secret_access_key": inputs.placeholder(inputs.S3_SECRET_ACCESS_KEY),
    }
    if run.session_token:
        settings["s3_session_token"] = inputs.placeholder(inputs.S3_SESSION_TOKEN)
    return {f"{role}_{name}": value for name, value in settings.items()}
