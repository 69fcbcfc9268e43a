"""The main job's variants, each whole: for make test-all."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from machine import ROOT, mayfly, nodes, publish_repository
from PIL import Image

import testenv
from mayfly import collection
from mayfly_train import s3

pytestmark = pytest.mark.slow

WAIT_S = 900


def deploy(*arguments: str):
    return mayfly("deploy", "--cloud", "local", "--json", *arguments)


def test_synchronous(clean):
    document = deploy("--workers", "2", "--mode", "sync").document
    assert document["ok"], document
    assert document["accuracy"] >= 0.85


def test_two_parameter_servers(clean):
    document = deploy("--workers", "2", "--ps", "2").document
    assert document["ok"], document
    assert document["accuracy"] >= 0.88


@pytest.mark.parametrize(
    ("engine", "steps", "accuracy"), [("tf-server", "300", 0.7), ("command", "937", 0.75)]
)
def test_an_engine_whole(clean, engine, steps, accuracy):
    done = deploy("--engine", engine, "--workers", "2", "--steps", steps)
    document = done.document
    assert done.code == 0, done.messages[-3000:]
    assert document["ok"], document
    assert document["leftovers"] == 0
    assert document["global_step"] >= int(steps)
    assert document["accuracy"] > accuracy


def test_nodes_preprocess_and_then_train_on_the_result(bucket, clean):
    """Fashion-MNIST's IDX files to tensors by both workers, which Horovod's ranks read."""
    scale = {"to": "tensors", "mean": "0.1307", "std": "0.3081"}
    flags = [word for key, value in scale.items()
             for word in ("--set", f"data.preprocess.{key}={value}")]  # fmt: skip
    done = deploy("--engine", "horovod", "--workers", "2", "--steps", "1874", *flags)
    document = done.document
    assert done.code == 0, done.messages[-3000:]
    assert document["ok"], document
    assert document["leftovers"] == 0
    assert document["accuracy"] > 0.75
    assert document["samples_seen"] == document["samples_processed"] == 1874 * 64
    run = s3.parse_uri(document["model_uri"].rstrip("/").removesuffix("model"))
    names = [name for name in s3.list_sizes(bucket, run.join("status")) if "preprocess-" in name]
    told = [s3.read_json(bucket, run.join("status", name)) for name in names]
    assert len(told) == 2, "each worker tells"
    for report in told:
        assert report["error"] is None
        assert report["files_done"] == report["files_total"] > 8, "shards of both splits"


def test_a_user_program_from_a_repository(platform, bucket, clean, tmp_path):
    program = (ROOT / "tests/e2e/programs/linear.py").read_text()
    url = publish_repository(platform, bucket, tmp_path, "linear", {"code/linear.py": program})
    settings = {
        "trainer.program": url,
        "trainer.directory": "code",
        "trainer.entrypoint": "linear.py",
        "trainer.steps": "400",
    }
    flags = [word for pair in settings.items() for word in ("--set", "=".join(pair))]
    document = deploy("--workers", "2", *flags).document
    assert document["ok"], document
    assert document["accuracy"] >= 0.7


def test_larger_images_by_the_job_file_alone(platform, clean, tmp_path):
    """224x224, four classes: the face-age task's shape, on small generated images."""
    random = np.random.default_rng(7)
    for index, label in enumerate(("kid", "young", "adult", "elder")):
        (tmp_path / "faces" / label).mkdir(parents=True)
        for number in range(24):
            pixels = random.integers(0, 60, (64, 64, 3), dtype=np.uint8) + np.uint8(index * 60)
            Image.fromarray(pixels).save(tmp_path / "faces" / label / f"{number}.png")
    source = "s3://mayfly/datasets/faces-e2e/"
    put = mayfly(
        "data",
        "put",
        str(tmp_path / "faces"),
        source,
        "--cloud",
        "local",
        "--image-size",
        "224",
        "--json",
    )
    assert put.code == 0, put.messages
    job = tmp_path / "faces.yml"
    job.write_text(
        f"name: faces\ncloud: local\ndata: {{source: '{source}'}}\n"
        "trainer: {steps: 30, args: {image_size: 224, classes: 4, batch_size: 8}}\n"
    )
    document = mayfly("deploy", str(job), "--workers", "1", "--json").document
    assert document["ok"], document
    assert document["global_step"] >= 30


def test_the_radl_stands_alone(platform, bucket, clean, tmp_path):
    """The upstream client and the rendered file are enough: the run ends well without us."""
    plan = mayfly("plan", "--cloud", "local", "--workers", "2", "--json").document
    radl, run_uri = Path(plan["radl"]), plan["run_uri"]
    assert testenv.CANARY not in radl.read_text()
    assert collection.build(ROOT).exists()
    client = [str(ROOT / ".venv/bin/python"), str(ROOT / "scripts/im_client.py")]
    client += ["-r", platform.im_url, "-a", str(platform.im_auth_file)]
    answers = f"{testenv.VARIABLES['MAYFLY_S3_ACCESS_KEY_ID']}\n{testenv.CANARY}\n"
    created = subprocess.run(
        [*client, "create", str(radl)], input=answers, capture_output=True, text=True, check=False
    )
    assert created.returncode == 0, created.stdout + created.stderr
    infrastructure = created.stdout.split()[-1]
    try:
        name, _, prefix = run_uri.removeprefix("s3://").partition("/")
        status: dict = {}
        deadline = time.monotonic() + WAIT_S
        while status.get("state") not in ("succeeded", "failed") and time.monotonic() < deadline:
            time.sleep(5)
            try:
                body = bucket.get_object(Bucket=name, Key=f"{prefix.strip('/')}/status.json")[
                    "Body"
                ]
                status = json.loads(body.read())
            except bucket.exceptions.NoSuchKey:
                continue
        assert status.get("state") == "succeeded", status
        assert status["accuracy"] >= 0.88
    finally:
        destroy = [*client, "destroy", infrastructure]
        gone = subprocess.run(destroy, input="yes\n", capture_output=True, text=True, check=False)
    assert gone.returncode == 0, gone.stdout + gone.stderr
    assert nodes(platform) == []
