"""`mayfly verify-clean`, `mayfly gc` and `mayfly destroy`; moto plays EC2 and S3, IM is a fake."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from tests.unit.deploy_fakes import FakeClock, FakeIM, FakeTraces
from tests.unit.lock_fakes import working
from tests.unit.test_sweep_openstack import FakeOpenStack, fill

from mayfly import cli, sweep_commands
from mayfly.auth import aws as aws_keys
from mayfly.credentials import S3Settings
from mayfly.destroy import Destroyer
from mayfly.errors import RemoteError
from mayfly.im import SilentManager, State
from mayfly.ledger import Ledger
from mayfly.redact import Secret
from mayfly.services import Services
from mayfly.sweep.aws import AwsAccount
from mayfly.sweep.leftovers import goes_on
from mayfly.sweep.openstack import OpenStackAccount
from mayfly.sweep.things import TAG, Thing
from mayfly.watch import Pace

RUN, OTHER_RUN = "faces-261128-100000-abcd", "faces-251101-080000-beef"
INFRA = "0a1b2c3d-0000-11f1-8000-0242ac110002"
OTHER_INFRA = "0a1b2c3d-0000-11f1-8000-0242ac110003"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """An empty account and ledger."""
    monkeypatch.setenv("MAYFLY_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("MAYFLY_CLOUD", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unit-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unit-secret")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    clock = FakeClock()
    quick = Pace(1.0, 60.0, clock=clock, sleep=clock.sleep)
    monkeypatch.setattr(sweep_commands, "GC_PACE", quick)
    monkeypatch.setattr(Destroyer.__init__, "__defaults__", (None, None, quick))
    with mock_aws():
        yield tmp_path


@pytest.fixture
def mayfly(monkeypatch, capsys):
    """Run the command as its executable does; returns exit code, standard output and error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mayfly", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def ledger(state):
    opened = Ledger(state / "ledger.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def ec2():
    return boto3.client("ec2", "us-east-1")


@pytest.fixture
def services(monkeypatch):
    """A run's surroundings: an IM, a bucket that answers, and the account."""
    bucket = boto3.client("s3", "us-east-1")
    bucket.create_bucket(Bucket="bucket")
    keys = S3Settings(Secret("id"), Secret("secret"), None, None, "us-east-1", "test")
    account = AwsAccount(lambda service, region: boto3.client(service, region), "us-east-1")
    made = Services(FakeIM(), keys, bucket, None, account=account)
    for module in (cli, sweep_commands):
        monkeypatch.setattr(module, "reopen_services", lambda *_, **__: made)
    return made


def add(ledger: Ledger, run: str = RUN, infrastructure: str = INFRA, state: str = "training"):
    ledger.add(run, "aws", f"s3://bucket/{run}/", {})
    ledger.set_infrastructure(run, infrastructure)
    ledger.add_place(run, "us-east-1", "123456789012")
    ledger.set_state(run, state)


def make_node(ec2, run: str, infrastructure: str, state: str = "running") -> str:
    """An instance in IM's groups; `stopped` as the dead-man timer leaves it."""
    groups = [
        ec2.create_security_group(GroupName=f"im-{infrastructure}{end}", Description="IM")
        for end in ("", "-private")
    ]
    ids = [group["GroupId"] for group in groups]
    interface = {"DeviceIndex": 0, "Groups": ids, "DeleteOnTermination": True}
    tag = {"ResourceType": "instance", "Tags": [{"Key": TAG, "Value": run}]}
    made = ec2.run_instances(
        ImageId="ami-12c6146b",
        MinCount=1,
        MaxCount=1,
        NetworkInterfaces=[interface],
        TagSpecifications=[tag],
    )
    node = made["Instances"][0]["InstanceId"]
    if state == "stopped":
        ec2.stop_instances(InstanceIds=[node])
    return node


def nodes(ec2) -> dict[str, str]:
    listed = ec2.describe_instances()["Reservations"]
    return {
        each["InstanceId"]: each["State"]["Name"] for group in listed for each in group["Instances"]
    }


# --- verify-clean --------------------------------------------------------------------------------


def test_the_proof_is_printed_kept_and_put_beside_the_run(mayfly, ledger, services):
    add(ledger, state="destroyed")
    code, out, _ = mayfly("verify-clean", RUN)
    assert code == 0
    assert out.endswith("nothing is left\n")
    for text in ("account 123456789012", "us-east-1", "spot request       0", "IM, "):
        assert text in out
    assert ledger.proof(RUN)["count"] == 0
    stored = services.client.get_object(Bucket="bucket", Key=f"{RUN}/clean.json")["Body"].read()
    assert json.loads(stored) == ledger.proof(RUN)
    code, out, _ = mayfly("verify-clean", "--json")
    document = json.loads(out)
    assert (code, document["ok"], document["count"]) == (0, True, 0)
    kinds = [each["kind"] for each in document["places"][0]["listed"]]
    assert {"instance", "spot request", "security group", "volume", "key pair"} <= {*kinds}


def test_what_is_left_is_named_not_removed_and_can_be_destroyed(mayfly, ledger, services, ec2):
    add(ledger, state="destroyed")
    node = make_node(ec2, RUN, INFRA)
    code, out, _ = mayfly("verify-clean", RUN, "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (1, False)
    assert f"instance {node} (running)" in document["left"]
    assert nodes(ec2) == {node: "running"}
    assert ledger.get(RUN).state == "destroying"
    code, out, _ = mayfly("destroy", RUN)
    assert code == 0
    assert out.endswith(f"nothing is left\nrun {RUN}: destroyed, nothing is left\n")
    assert nodes(ec2) == {node: "terminated"}
    assert mayfly("verify-clean", RUN)[0] == 0


def test_an_im_that_is_gone_is_told_and_the_account_decides(
    mayfly, ledger, services, ec2, monkeypatch
):
    add(ledger)
    make_node(ec2, RUN, INFRA)
    gone = Services(
        SilentManager(RemoteError("IM does not answer at http://localhost")),
        services.s3,
        services.client,
        None,
        account=services.account,
    )
    monkeypatch.setattr(cli, "reopen_services", lambda *_, **__: gone)
    monkeypatch.setattr(sweep_commands, "reopen_services", lambda *_, **__: gone)
    code, out, err = mayfly("destroy", RUN)
    assert code == 0
    assert "without IM: IM does not answer" in err
    assert "not listed: IM does not answer" in out


def test_without_a_sweep_of_ours_it_is_ims_word(mayfly, ledger, services, monkeypatch):
    add(ledger, state="destroyed")
    alone = Services(FakeIM(), services.s3, services.client, None)
    monkeypatch.setattr(sweep_commands, "reopen_services", lambda *_, **__: alone)
    code, out, _ = mayfly("verify-clean")
    assert code == 0
    assert "IM's word" in out
    silent = Services(SilentManager(RemoteError("gone")), services.s3, services.client, None)
    monkeypatch.setattr(sweep_commands, "reopen_services", lambda *_, **__: silent)
    code, out, _ = mayfly("verify-clean")
    assert code == 1
    assert "IM says nothing: gone" in out


def test_local_lists_containers_and_starts_nothing_when_it_is_gone(mayfly, ledger, monkeypatch):
    ledger.add("one", "local", "s3://mayfly/one/", {})
    ledger.set_infrastructure("one", INFRA)
    ledger.set_state("one", "destroyed")
    monkeypatch.setattr(sweep_commands, "reopen_services", None)
    monkeypatch.setattr(sweep_commands, "platform", FakeTraces(left=["container 1"], stuck=True))
    code, out, _ = mayfly("verify-clean", "one")
    assert code == 1
    assert "container          1" in out
    monkeypatch.setattr(sweep_commands, "platform", FakeTraces())
    code, out, _ = mayfly("verify-clean", "one")
    assert code == 0
    assert "mayfly local down" in out


def test_an_unknown_run_names_the_nearest(mayfly, ledger):
    add(ledger)
    code, _, err = mayfly("verify-clean", RUN[:-1])
    assert code == 2
    assert RUN in err


# --- gc ------------------------------------------------------------------------------------------


def test_runs_are_shown_with_age_and_those_that_go_on_are_kept(mayfly, ledger, ec2):
    add(ledger, RUN, INFRA, "training")
    running = make_node(ec2, RUN, INFRA)
    unknown = make_node(ec2, OTHER_RUN, OTHER_INFRA)
    foreign = ec2.create_security_group(GroupName="im-frontend", Description="x")["GroupId"]
    code, out, _ = mayfly("gc", "--cloud", "aws", "--json")
    document = json.loads(out)
    assert (code, document["removed"]) == (0, 0)
    runs = {each["run"]: each for each in document["runs"]}
    assert (runs[RUN]["goes_on"], runs[RUN]["state"]) == (True, "training")
    assert (runs[OTHER_RUN]["goes_on"], runs[OTHER_RUN]["known"]) == (False, False)
    assert runs[OTHER_RUN]["since"].startswith("2025-11-01T08:00:00")
    assert {thing["kind"] for thing in runs[OTHER_RUN]["things"]} >= {"instance", "security group"}
    code, out, err = mayfly("gc", "--cloud", "aws")
    assert code == 2
    assert f"run {OTHER_RUN}" in out
    assert "unknown here" in out
    assert "goes on (training)" in out
    assert "--yes" in err
    assert mayfly("gc", "--cloud", "aws", "--yes")[0] == 0
    assert nodes(ec2)[unknown] == "running", "it may be at work for another machine"
    code, out, _ = mayfly("gc", "--cloud", "aws", "--yes", "--run", OTHER_RUN)
    assert code == 0
    assert "\nremoved " in out
    assert nodes(ec2) == {running: "running", unknown: "terminated"}
    names = [each["GroupName"] for each in ec2.describe_security_groups()["SecurityGroups"]]
    assert {f"im-{INFRA}", "im-frontend"} <= {*names}
    assert f"im-{OTHER_INFRA}" not in names
    assert foreign
    assert ("remove", "done") in {(e.action, e.outcome) for e in ledger.journal(OTHER_RUN)}
    assert json.loads(mayfly("gc", "--cloud", "aws", "--json")[1])["runs"][0]["run"] == RUN


def test_nodes_that_their_timer_powered_off_are_offered(mayfly, ledger, ec2):
    add(ledger, RUN, INFRA, "training")
    node = make_node(ec2, RUN, INFRA, "stopped")
    (found,) = json.loads(mayfly("gc", "--cloud", "aws", "--json")[1])["runs"]
    assert (found["goes_on"], found["powered_off"]) == (False, 1)
    assert mayfly("gc", "--cloud", "aws", "--yes", "--run", RUN)[0] == 0
    assert nodes(ec2) == {node: "terminated"}
    assert ledger.get(RUN).state == "destroying"


def test_other_regions_are_those_named_or_of_runs_here(mayfly, ledger):
    far = boto3.client("ec2", "eu-west-1")
    make_node(far, OTHER_RUN, OTHER_INFRA)
    nothing = mayfly("gc", "--cloud", "aws")
    assert nothing[0] == 0
    assert "nothing is left of any run" in nothing[1]
    words = ("gc", "--cloud", "aws", "--region", "eu-west-1", "--json")
    assert len(json.loads(mayfly(*words)[1])["runs"]) == 1
    add(ledger, "one", INFRA, "destroyed")
    ledger.add_place("one", "eu-west-1")
    assert len(json.loads(mayfly("gc", "--cloud", "aws", "--json")[1])["runs"]) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gc"], "choose one with --cloud: aws, azure, egi, gcp, opennebula, openstack"),
        (["gc", "--cloud", "awz"], "unknown cloud: 'awz'"),
        (["gc", "--cloud", "local"], "nodes on cloud 'local' cost nothing"),
        (["gc", "--cloud", "aws", "--run", "one"], "unknown leftover run: 'one'"),
        (["gc", "--cloud", "openstack"], "no OpenStack credentials: missing OS_CLOUD"),
        (["verify-clean"], "mayfly deploy"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(mayfly, words, says, monkeypatch):
    for name in ("OS_CLOUD", "OS_AUTH_URL"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = mayfly(*words)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]


def refusing(call: str) -> AwsAccount:
    """An account whose owner may not make one of the calls."""

    class Refusing(AwsAccount):
        def place(self, region):
            found = super().place(region)

            def refuse(**_):
                error = {"Error": {"Code": "UnauthorizedOperation", "Message": "not you"}}
                raise ClientError(error, call)

            found.client.meta.events.register(f"before-call.ec2.{call}", refuse)
            return found

    return Refusing(lambda service, region: boto3.client(service, region), "us-east-1")


def test_what_may_not_be_listed_is_told_by_kind(mayfly, ec2, monkeypatch):
    monkeypatch.setattr(sweep_commands, "find_account", lambda *_: refusing("DescribeVolumes"))
    make_node(ec2, OTHER_RUN, OTHER_INFRA)
    code, out, _ = mayfly("gc", "--cloud", "aws", "--json")
    document = json.loads(out)
    assert (code, document["ok"], len(document["runs"])) == (1, False, 1)
    assert document["unlisted"] == [
        "volumes in Amazon EC2, us-east-1: UnauthorizedOperation: not you"
    ]


def test_missing_keys_are_named(mayfly, monkeypatch):
    monkeypatch.setattr(aws_keys, "look", lambda environ: None)
    code, _, err = mayfly("gc", "--cloud", "aws")
    assert code == 2
    assert "missing AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in err


def test_a_run_that_goes_on_is_not_removed_though_it_is_named(mayfly, ledger, ec2):
    add(ledger)
    node = make_node(ec2, RUN, INFRA)
    code, _, err = mayfly("gc", "--cloud", "aws", "--run", RUN, "--yes")
    assert code == 2
    assert f"run {RUN} goes on: training" in err
    assert nodes(ec2) == {node: "running"}


def test_a_run_that_a_process_works_on_is_never_a_leftover(mayfly, ledger, state, ec2):
    """By its state and its nodes it would be one."""
    add(ledger, RUN, INFRA, "destroying")
    node = make_node(ec2, RUN, INFRA)
    with working(state / "ledger.sqlite", RUN, "mayfly destroy"):
        (found,) = json.loads(mayfly("gc", "--cloud", "aws", "--yes", "--json")[1])["runs"]
        assert found["goes_on"] is True
        code, _, err = mayfly("gc", "--cloud", "aws", "--run", RUN, "--yes")
        assert code == 2
        assert f"run {RUN} goes on: destroying" in err
    assert nodes(ec2) == {node: "running"}
    assert mayfly("gc", "--cloud", "aws", "--run", RUN, "--yes")[0] == 0
    assert nodes(ec2) == {node: "terminated"}


def test_a_run_that_was_taken_up_since_it_was_listed_is_left(
    mayfly, ledger, state, ec2, monkeypatch
):
    add(ledger, RUN, INFRA, "destroying")
    node = make_node(ec2, RUN, INFRA)
    monkeypatch.setattr(Ledger, "at_work", lambda *_: None)
    with working(state / "ledger.sqlite", RUN, "mayfly destroy") as other:
        code, out, _ = mayfly("gc", "--cloud", "aws", "--run", RUN, "--yes", "--json")
    document = json.loads(out)
    assert (code, document["removed"]) == (1, 0)
    busy = f"run {RUN} is at work: mayfly destroy, process {other.pid} since 20"
    assert all(busy in each for each in document["left"])
    assert nodes(ec2) == {node: "running"}


def test_a_run_that_began_while_the_account_was_listed_is_known(mayfly, ledger, ec2, monkeypatch):
    look = AwsAccount.place

    def begin(self, region):
        if not ledger.runs():
            add(ledger, RUN, INFRA, "creating")
        return look(self, region)

    monkeypatch.setattr(AwsAccount, "place", begin)
    make_node(ec2, RUN, INFRA)
    (found,) = json.loads(mayfly("gc", "--cloud", "aws", "--json")[1])["runs"]
    assert (found["known"], found["goes_on"]) == (True, True)


@pytest.mark.parametrize(
    ("recorded", "had", "age_s", "expected"),
    [
        ("training", "running", 10, True),
        ("training", "stopped", 10, False),
        ("training", None, 10, False),
        ("creating", None, 10, True),
        ("creating", None, 10**5, False),
        ("kept", "stopped", 10**6, True),
        ("destroying", "running", 10, False),
        ("destroyed", "running", 10, False),
    ],
)
def test_who_goes_on(ledger, recorded, had, age_s, expected):
    add(ledger, state=recorded)
    record = ledger.get(RUN)
    things = [Thing("instance", "i-1", "x", RUN, had)] if had else []
    moment = datetime.fromisoformat(record.updated) + timedelta(seconds=age_s)
    assert goes_on(record, things, moment.astimezone(UTC)) is expected


def test_a_run_at_work_is_kept_while_nobody_can_tell_whether_it_has_nodes(
    mayfly, ledger, ec2, monkeypatch
):
    add(ledger, RUN, INFRA, "training")
    node = make_node(ec2, RUN, INFRA)
    monkeypatch.setattr(sweep_commands, "find_account", lambda *_: refusing("DescribeInstances"))
    code, out, _ = mayfly("gc", "--cloud", "aws", "--yes", "--json")
    (found,) = json.loads(out)["runs"]
    assert (code, found["goes_on"]) == (1, True)
    assert nodes(ec2) == {node: "running"}


def test_what_could_not_be_looked_at_after_the_removal_is_not_called_removed(
    mayfly, ledger, ec2, monkeypatch
):
    add(ledger, RUN, INFRA, "destroyed")
    make_node(ec2, RUN, INFRA)
    monkeypatch.setattr(sweep_commands, "find_account", lambda *_: refusing("DescribeVolumes"))
    code, out, _ = mayfly("gc", "--cloud", "aws", "--yes", "--run", RUN, "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (1, False)
    assert any("volumes" in each and "could not be listed" in each for each in document["left"])


# --- gc on OpenStack ------------------------------------------------------------------------------


@pytest.fixture
def project(monkeypatch):
    """A project with somebody else's servers, and a run of ours whose timer has powered it off."""
    cloud = FakeOpenStack()
    fill(cloud, "", "frontend", "theirs")
    account = OpenStackAccount(lambda region=None: cloud)
    monkeypatch.setattr(sweep_commands, "find_credential", lambda *_: None)
    monkeypatch.setattr(sweep_commands, "find_account", lambda *_: account)
    return cloud


def test_servers_that_are_off_are_offered_and_foreign_ones_stay(mayfly, ledger, project):
    theirs = project.names()
    ledger.add(RUN, "openstack", f"s3://bucket/{RUN}/", {})
    ledger.set_infrastructure(RUN, INFRA)
    ledger.set_state(RUN, "training")
    fill(project, RUN, INFRA, "ours")
    for server in project.rows("servers"):
        server.status = "SHUTOFF"
    code, out, _ = mayfly("gc", "--cloud", "openstack", "--yes")
    assert code == 0
    assert f"run {RUN}" in out and "2 nodes powered off" in out and "theirs" not in out
    assert project.names() == theirs
    assert ledger.get(RUN).state == "destroying"  # `mayfly destroy` lets IM forget it


def test_a_run_whose_servers_are_on_goes_on(mayfly, ledger, project):
    ledger.add(RUN, "openstack", f"s3://bucket/{RUN}/", {})
    ledger.set_infrastructure(RUN, INFRA)
    ledger.set_state(RUN, "training")
    fill(project, RUN, INFRA, "ours")
    everything = project.names()
    code, out, _ = mayfly("gc", "--cloud", "openstack", "--yes")
    assert (code, project.names()) == (0, everything)
    assert "goes on (training)" in out


# --- gc by IM's word ------------------------------------------------------------------------------

OFF = State("off", {"0": "off", "1": "stopped"})


@pytest.fixture
def im(monkeypatch):
    """IM of a cloud whose account nobody here can list."""
    made = FakeIM()
    keys = S3Settings(Secret("id"), Secret("secret"), None, None, "us-east-1", "test")
    alone = Services(made, keys, None, None)
    monkeypatch.setattr(sweep_commands, "find_credential", lambda *_: None)
    monkeypatch.setattr(sweep_commands, "reopen_services", lambda *_, **__: alone)
    return made


def add_to_im(ledger: Ledger, im: FakeIM, run: str, infrastructure: str, state: State) -> None:
    ledger.add(run, "gcp", f"s3://bucket/{run}/", {})
    ledger.set_infrastructure(run, infrastructure)
    ledger.set_state(run, "training")
    im.radls[infrastructure] = f"instance_tags = 'mayfly-run={run}'"
    im.states[infrastructure] = [state]


def test_without_a_sweep_nodes_that_are_off_are_destroyed_by_im(mayfly, ledger, im):
    add_to_im(ledger, im, RUN, INFRA, OFF)
    add_to_im(ledger, im, OTHER_RUN, OTHER_INFRA, State("configured", {"0": "configured"}))
    im.radls["somebody-elses"] = "no run of ours"
    code, out, _ = mayfly("gc", "--cloud", "gcp", "--yes")
    assert code == 0
    assert f"node {INFRA}/0 (off) in IM" in out and "2 nodes powered off" in out
    assert "IM's word" in out and out.endswith("removed 2\n")
    assert im.asked == [INFRA]
    assert ledger.get(RUN).destroyed
    assert ledger.get(OTHER_RUN).state == "training"
    assert "IM's word" in json.dumps(ledger.proof(RUN))


def test_a_run_of_which_im_lists_no_node_is_noted(mayfly, ledger, im):
    ledger.add(RUN, "gcp", f"s3://bucket/{RUN}/", {})
    ledger.set_state(RUN, "training")
    document = json.loads(mayfly("gc", "--cloud", "gcp", "--json")[1])
    assert (document["ok"], document["runs"], document["places"]) == (True, [], ["IM"])
    assert any(f"`mayfly destroy {RUN}` proves it" in note for note in document["notes"])


def test_an_infrastructure_whose_id_never_came_back_is_found(mayfly, ledger, im):
    add_to_im(ledger, im, RUN, INFRA, OFF)
    ledger.set_infrastructure(RUN, None)
    document = json.loads(mayfly("gc", "--cloud", "gcp", "--json")[1])
    assert [each["id"] for each in document["runs"][0]["things"]] == [f"{INFRA}/0", f"{INFRA}/1"]


def test_an_im_that_does_not_destroy_is_named(mayfly, ledger, im):
    add_to_im(ledger, im, RUN, INFRA, OFF)
    im.polls_until_gone = 10_000
    code, out, _ = mayfly("gc", "--cloud", "gcp", "--yes")
    assert code == 1
    assert f"left: node {INFRA}/0 (off) in IM: IM does not destroy {INFRA}" in out
    assert ledger.get(RUN).state == "destroying"


def test_an_im_that_is_silent_is_not_taken_for_an_empty_one(mayfly, ledger, im, monkeypatch):
    add_to_im(ledger, im, RUN, INFRA, OFF)
    silent = Services(SilentManager(RemoteError("IM is gone")), None, None, None)
    monkeypatch.setattr(sweep_commands, "reopen_services", lambda *_, **__: silent)
    code, out, _ = mayfly("gc", "--cloud", "gcp", "--yes")
    assert code == 1
    assert f"not listed: nodes in IM: of run {RUN}: IM is gone" in out


def test_im_is_asked_for_no_region(mayfly, im):
    code, _, err = mayfly("gc", "--cloud", "gcp", "--region", "us-central1-a")
    assert code == 2
    assert "--region us-central1-a does not go with cloud 'gcp'" in err
