"""Everything that can be done before a node exists: services, keys, buckets, data, the RADL."""

from __future__ import annotations

from dataclasses import replace

from mayfly import collection, data, fashion_mnist, images, inventory, juicefs, preflight
from mayfly.collection import Published
from mayfly.display import Phases
from mayfly.engines import image_extras
from mayfly.errors import UserError
from mayfly.failover import Attempt, Cause
from mayfly.fashion_mnist import Made
from mayfly.images import NoImage
from mayfly.job import Job, Ready, Tools
from mayfly.own.machines import Machines
from mayfly.places import Place
from mayfly.radl_render import write_radl
from mayfly.run import Run, new_run_id
from mayfly.run_store import RunStore
from mayfly.services import LOCAL, Services, local_image, open_machines, open_services
from mayfly.spec import CHECKOUT, JUICEFS, ClusterSpec
from mayfly.steps import GROUPS


def prepare(job: Job, tools: Tools, phases: Phases, *, only_look: bool = False) -> Ready:
    """Start what the cloud needs, check keys, buckets and data, and render the RADL.

    With `only_look`, nothing is put into a bucket of the user's. Raises an error for everything
    that is known to be wrong now.
    """
    spec, display = job.spec, tools.display
    own = job.profile.backend == "inventory"
    require_deployable(job)
    with phases.phase("services"):
        services = (
            open_machines(job.inventory, tools.environ, tools.cache)
            if job.inventory
            else open_services(spec.cloud, tools.environ, display.say)
        )
    display.redact = display.redact.knowing([*services.secrets, *job.secrets.values()])
    preflight.check_bucket(services.client, str(spec.model.destination))
    preflight.check_store(spec.store, services.s3.endpoint, local=services.platform is not None)
    if job.trains:
        _check_data(job, tools, services, phases, only_look)
    with phases.phase("image"):
        job, image, passed = _first_with_image(job, services, tools)
    spec = job.spec
    with phases.phase("collection"):
        roles = _roles(job, tools, services, only_look)
        display.redact = display.redact.knowing(roles.secrets.values())
        run = _new_run(job, services, image, roles.name)
    uri = run.uri(spec)
    if services.machines:
        with phases.phase("machines"):
            services.machines.require_free()
        job = _at_home(job, services.machines)
    radl = inventory.text(spec, run) if own else job.render(spec, job.profile, run)
    path = tools.build / (f"{run.id}.vars.yml" if own else f"{run.id}.radl")
    write_radl(radl, path)
    what = "variables" if own else "RADL"
    display.say(f"run {run.id}: {_nodes(job)} on {job.profile.title}; {what} in {path}")
    store = RunStore(services.client, uri)
    return Ready(job, run, uri, services, store, radl, path, passed, roles.secrets)


def require_deployable(job: Job) -> None:
    """Raise UserError for what machines of the user's own do not do."""
    if job.profile.backend != "inventory":
        return
    if job.inventory is None:
        raise UserError(f"cloud {job.profile.name!r} needs an inventory", "give --inventory FILE")
    if job.spec.store == JUICEFS:
        raise UserError(
            f"store {JUICEFS!r} is not for {job.profile.title}: it would stay mounted there",
            "set store: hdfs",
        )


def _at_home(job: Job, machines: Machines) -> Job:
    """The job with its machines as its place: what is left of a run is looked for on these."""
    return replace(job, place=Place({"region": ",".join(machines.hosts().names)}))


def _first_with_image(
    job: Job, services: Services, tools: Tools
) -> tuple[Job, str, tuple[Attempt, ...]]:
    """Return the first offer whose image exists, its image, and the offers that were passed over.

    Raises NoImage when it is the last one that has none.
    """
    passed: list[Attempt] = []
    for number, offer in enumerate((job, *job.others)):
        one = replace(offer, keep=job.keep, others=job.others[number:])
        try:
            return one, image_of(one, services, tools), tuple(passed)
        except NoImage as error:
            if not one.others:
                raise
            passed.append(one.tried(Cause.IMAGE, str(error)))
            tools.display.say(passed[-1].line())
    raise AssertionError("a job is its own first offer")


def image_of(job: Job, services: Services, tools: Tools) -> str:
    """Return IM's URL of the nodes' image. Raises NoImage."""
    if services.machines:
        return images.describe(job.spec, job.profile)
    if services.platform is None:
        try:
            return images.resolve(job.spec, job.profile, job.place, job.finder)
        except UserError as error:
            raise NoImage(error.message, error.hint) from error
    trainer = job.spec.trainer
    extras = image_extras(trainer.engine, trainer.runtime) if job.trains else job.extras
    extras += juicefs.image_extras(job.spec.store)
    return local_image(extras, tools.display.say)


def _nodes(job: Job) -> str:
    names = {"ps": "ps" if job.trains else "head", "worker": "worker"}
    counts = ((job.spec.count(group), names[group]) for group in GROUPS)
    return f"{' + '.join(f'{count} {name}' for count, name in counts if count)} nodes"


def register(ready: Ready, tools: Tools) -> None:
    """Make the run known, here and in the bucket, which also shows that the keys can write."""
    spec = ready.job.spec.model_dump(mode="json")
    ready.store.write_job(spec)
    cloud, im = ready.job.spec.cloud, ready.services.im_url
    tools.ledger.add(ready.run.id, cloud, ready.uri, spec, im)
    note_place(ready, ready.job, tools)
    if ready.job.basis:
        tools.ledger.set_cost(ready.run.id, ready.job.basis.document())


def note_place(ready: Ready, job: Job, tools: Tools) -> None:
    """Record where nodes are about to be made: destroy sweeps there."""
    if account := ready.services.account:
        tools.ledger.add_place(ready.run.id, job.place.region, account.who())


def _check_data(
    job: Job, tools: Tools, services: Services, phases: Phases, only_look: bool
) -> None:
    """Check the data that the job names; a default job's is put where it is not yet.

    With `only_look`, that it would be put into the user's bucket is only said.
    """
    spec, platform = job.spec, services.platform
    here = platform is not None and services.s3.endpoint == platform.s3_endpoint
    source = spec.data.source
    known = fashion_mnist.made_for(source) if here else fashion_mnist.made_for_bucket(spec)
    if known and preflight.is_unfinished(services.client, source, known.names):
        if only_look and not here:
            tools.display.say(f"data: {known.what_is_put(spec)} by deploy: it is not there yet")
            return
        _provide_data(spec, known, tools, services, phases)
    theirs = "aws" if spec.cloud == LOCAL else spec.cloud  # any that is not local has their keys
    dataset = preflight.check_dataset(services.client, source, LOCAL if here else theirs)
    preflight.check_preprocess(spec, dataset)
    tools.display.say(f"data: {dataset.uri}, {dataset.describe()}")


def _provide_data(
    spec: ClusterSpec, known: Made, tools: Tools, services: Services, phases: Phases
) -> None:
    """Put the default jobs' data into the bucket. Raises UserError where it cannot be had here."""
    source = spec.data.source
    tools.display.say(f"data: {known.what_is_put(spec)}: it is not there yet")
    with phases.phase("data") as report:
        try:
            directory = known.prepare(tools.cache, report)
        except UserError as error:
            put = f"mayfly data put DIRECTORY {source} {known.words} --cloud {spec.cloud}"
            raise UserError(
                error.message, f"{error.hint}, or, with its four files in DIRECTORY, run `{put}`"
            ) from error
        data.put(directory, source, services.client, known.options, report)


def _roles(job: Job, tools: Tools, services: Services, only_look: bool) -> Published:
    """How the RADL names the collection, which is put where nodes can fetch it, if it has to be."""
    spec, profile = job.spec, job.profile
    if name := collection.elsewhere(spec):
        return Published(name)
    if only_look and profile.collection == "bucket":
        return Published(collection.SIGNED)
    tarball = collection.build(CHECKOUT, tools.cache)
    destination, endpoint = str(spec.model.destination), services.s3.endpoint
    return collection.publish(tarball, services.client, profile, destination, endpoint)


def _new_run(job: Job, services: Services, image: str, roles: str) -> Run:
    return Run(
        id=new_run_id(job.spec.name),
        image=image,
        collection=roles,
        s3_endpoint=services.s3.endpoint,
        s3_region=services.s3.region,
        session_token=services.s3.session_token is not None,
        keep=job.keep,
        region=job.place.region,
        train_s=job.basis.train_s if job.basis else None,
        end_s=job.basis.end_s if job.basis else None,
    )
