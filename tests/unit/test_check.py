"""What `mayfly check` finds; clouds and IM are fakes, the ledger of secrets is not."""

from __future__ import annotations

import json

import pytest

from mayfly import check
from mayfly.auth.credential import Identity, Missing, Untried
from mayfly.auth.entry import Entry
from mayfly.errors import RemoteError, UserError
from mayfly.redact import Secret

CANARY = "canary-of-the-tests"
S3 = {"MAYFLY_S3_ACCESS_KEY_ID": "id", "MAYFLY_S3_SECRET_ACCESS_KEY": CANARY}


class FakeCredential:
    origin = "the tests"

    def __init__(self, answer: Identity | Exception) -> None:
        self.answer = answer

    def entry(self) -> Entry:
        return Entry("EC2", "ec2", {"password": Secret(CANARY)})

    def identify(self) -> Identity:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def found(monkeypatch):
    """Look at a cloud whose credentials say `answer`, with an IM that takes the keys."""
    monkeypatch.setattr(check, "_im", lambda environ: "IM 2.0.0 takes the keys")

    def look(answer, environ=S3):
        def find(environ):
            if isinstance(answer, Missing):
                raise answer
            return FakeCredential(answer)

        monkeypatch.setitem(check.FINDERS, "aws", find)
        findings = list(check.look("aws", environ))
        return check.document("aws", findings), check.exit_code(findings), check.lines(findings)

    return look


def states(document):
    return {one["check"]: one["state"] for one in document["checks"]}


def test_all_is_there(found):
    document, code, lines = found(Identity("account 1, arn", 0.4))
    assert (document["ok"], code, document["who"]) == (True, 0, "account 1, arn")
    assert states(document) == dict.fromkeys(("credentials", "identity", "clock", "im", "s3"), "ok")
    assert len(lines.splitlines()) == 5
    assert CANARY not in json.dumps(document) + lines


def test_what_is_missing_is_named_and_the_rest_is_looked_at(found):
    document, code, _ = found(Missing("no AWS credentials", ["AWS_ACCESS_KEY_ID"], "set it"))
    assert (document["ok"], code, document["missing"]) == (False, 2, ["AWS_ACCESS_KEY_ID"])
    assert states(document) == {"credentials": "missing", "im": "ok", "s3": "ok"}


def test_what_could_not_be_tried_fails_nothing(found):
    document, code, _ = found(Untried("the library is not installed"))
    assert (code, states(document)["identity"], document["who"]) == (0, "not tried", None)


@pytest.mark.parametrize(
    ("error", "code"), [(UserError(f"refused {CANARY}"), 2), (RemoteError(f"gone {CANARY}"), 1)]
)
def test_whose_fault_it_is_decides_the_exit_code(found, error, code):
    document, found_code, lines = found(error)
    assert (found_code, states(document)["identity"]) == (code, "failed")
    assert CANARY not in json.dumps(document) + lines


def test_a_clock_that_is_wrong_is_told(found):
    document, code, lines = found(Identity("account 1", -400.0))
    assert (code, states(document)["clock"]) == (2, "failed")
    assert "this machine's clock is -400 s from the cloud's" in lines


def test_a_bucket_name_that_is_none(found):
    document, code, _ = found(Identity("a", None), {**S3, "MAYFLY_BUCKET": "No_Bucket"})
    assert (code, states(document)["s3"], states(document)["clock"]) == (2, "failed", "not tried")


def test_a_cloud_that_nobody_knows():
    with pytest.raises(UserError, match="did you mean 'azure'"):
        list(check.look("azur", {}))


def test_machines_of_ones_own_need_no_keys_and_no_im():
    document = check.document("static", list(check.look("static", S3)))
    assert states(document) == {"credentials": "ok", "s3": "ok"}


def test_this_machine(monkeypatch, tmp_path):
    def taken(kind, paths, environ):
        raise UserError("port 8800 on 127.0.0.1 is taken", "set MAYFLY_IM_PORT")

    monkeypatch.setattr(check.engine, "check", lambda paths, environ: "answers at unix:///x")
    monkeypatch.setattr(check.imservice, "check", taken)
    monkeypatch.setattr(check.s3server, "check", lambda paths, environ: None)
    findings = list(check.look("local", {"MAYFLY_STATE_DIR": str(tmp_path / "none")}))
    assert states(check.document("local", findings)) == {
        "engine": "ok",
        "im": "failed",
        "s3": "ok",
    }
    assert check.exit_code(findings) == 2
    assert not (tmp_path / "none").exists()
