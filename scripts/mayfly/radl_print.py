"""What scripts/render_radl.py runs: a job file in, RADL on standard output, no service needed.

`mayfly plan` does the same with the image, roles and S3 service that the platform has.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mayfly import images
from mayfly.clouds import CloudProfile, load_job
from mayfly.collection import SIGNED, elsewhere
from mayfly.errors import MayflyError, UserError
from mayfly.places import Place, find_place
from mayfly.radl_render import render
from mayfly.run import Run, new_run_id
from mayfly.spec import ClusterSpec, parse_assignment
from mayfly.steps import load_stages


def main(arguments: list[str] | None = None) -> int:
    """Print the RADL, or one line about what is wrong; the process's exit code."""
    try:
        print(_rendered(_parser().parse_args(arguments)), end="")
    except MayflyError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="render_radl.py", description="Print the RADL of a job.")
    parser.add_argument("job", nargs="?", type=Path, help="job file (default: the default job)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--image", help="IM's image URL (default: the cloud's)")
    parser.add_argument("--collection", help="tarball URL or name,version (default: an input)")
    parser.add_argument("--s3-endpoint", help="S3 service as nodes reach it (default: Amazon's)")
    parser.add_argument("--s3-region", default="us-east-1")
    return parser


def _rendered(options: argparse.Namespace) -> str:
    overrides = dict(parse_assignment(text) for text in options.set)
    spec, profile = load_job(options.job, overrides, os.environ)
    place = find_place(spec, profile, os.environ)
    image = options.image or _image(spec, profile, place)
    run = Run(
        id=new_run_id(spec.name),
        image=image,
        collection=options.collection or elsewhere(spec) or SIGNED,
        s3_endpoint=options.s3_endpoint,
        s3_region=options.s3_region,
        region=place.region,
    )
    return render(spec, profile, run, load_stages())


def _image(spec: ClusterSpec, profile: CloudProfile, place: Place) -> str:
    """The image's URL, where it is known without asking a provider."""
    if profile.image is None:
        raise UserError(f"cloud {profile.name!r} has no image of its own", "give --image URL")
    return images.resolve(spec, profile, place)


if __name__ == "__main__":
    sys.exit(main())
