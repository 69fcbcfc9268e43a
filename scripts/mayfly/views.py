"""Tables for people, of runs and of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any

from rich.markup import escape
from rich.table import Table

from mayfly import choices, planning
from mayfly.clouds import CloudProfile, known_clouds, load_cloud
from mayfly.display import duration
from mayfly.job import Ready
from mayfly.ledger import Record
from mayfly.local.platform import LocalPlatform
from mayfly.offer import Offers
from mayfly.places import Target
from mayfly.planning import Plan
from mayfly.prices import PriceList
from mayfly.spending import describe
from mayfly.watch import Status

OFF = ("off", "stopped")  # IM's words for a node that is powered off


def run_document(record: Record) -> dict[str, Any]:
    """Return what `ls` says of a run."""
    summary = record.summary or {}
    return {
        "run": record.run,
        "cloud": record.cloud,
        "state": record.state,
        "outcome": record.outcome,
        "accuracy": summary.get("accuracy"),
        "uri": record.uri,
        "infrastructure": record.infrastructure,
        "created": record.created,
        "updated": record.updated,
        "error": record.error,
    }


def runs_table(documents: Iterable[Mapping[str, Any]]) -> Table:
    """Return the runs as a table, in the order given."""
    table = Table(box=None, pad_edge=False)
    for title in ("RUN", "CLOUD", "NODES", "OUTCOME", "ACCURACY", "STARTED"):
        table.add_column(title, no_wrap=title == "RUN")
    for run in documents:
        accuracy = run.get("accuracy")
        table.add_row(
            run["run"],
            run["cloud"],
            run["state"],
            run["outcome"] or "",
            "" if accuracy is None else f"{accuracy:.4f}",
            run["created"][:19].replace("T", " "),
        )
    return table


def status_document(
    record: Record,
    status: Status | None,
    nodes: Mapping[str, str],
    preprocessing: str = "",
    cost: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what `status` says: the record, what the run reports, and its nodes' states.

    Before training, `preprocessing` is how far that is; `cost` is None where no price is known.
    """
    return {
        **run_document(record),
        "nodes": dict(nodes),
        "preprocessing": preprocessing or None,
        "cost": dict(cost) if cost else None,
        "notices": _off_notices(record, nodes),
        "status": status.raw if status else None,
    }


def _off_notices(record: Record, nodes: Mapping[str, str]) -> list[str]:
    """What nodes still cost that have powered themselves off, where that does not end them."""
    off = [name for name, state in sorted(nodes.items()) if state in OFF]
    profile = load_cloud(record.cloud)
    gone = profile.off_is_gone and record.im is None
    if not off or profile.off_costs is None or gone:
        return []
    costs = f"powered off, and on {profile.title} that still costs {profile.off_costs}"
    return [f"{', '.join(off)}: {costs}: `mayfly destroy {record.run}`"]


def status_table(document: Mapping[str, Any], status: Status | None) -> Table:
    """Return one run's state as a table."""
    table = Table(title=f"run {document['run']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for key in ("state", "outcome", "error", "uri", "infrastructure", "preprocessing"):
        if document.get(key):
            table.add_row(key, str(document[key]))
    if document["cost"]:
        table.add_row("cost", describe(document["cost"]))
    for node, state in document["nodes"].items():
        table.add_row(node, state)
    for notice in document["notices"]:
        table.add_row("note", notice)
    if status is not None:
        table.add_row("reports", f"{status.state} ({status.updated})")
        table.add_row("progress", status.line())
        for task, what in sorted(status.tasks.items()):
            table.add_row(task, f"{what.get('state')} on {what.get('node')}")
    return table


def plan_document(plan: Plan, made: Mapping[str, Any], *, dry_run: bool) -> dict[str, Any]:
    """Return what `plan` says: what a run would be made of, its price, and what was written.

    `made` names the run, its URI, the image and the files.
    """
    return {
        **made,
        "dry_run": dry_run,
        **planning.document(plan),
        "spec": plan.spec.model_dump(mode="json"),
    }


def offers_document(offers: Offers, made: Mapping[str, Any], *, dry_run: bool) -> dict[str, Any]:
    """Return what `plan` says of a job: the first offer's plan, and all `offers` in their order."""
    document = plan_document(offers.first.plan, made, dry_run=dry_run)
    document["notices"] = list(offers.all_notices)
    document["order"] = offers.order
    document["offers"] = [_offer(offer.plan) for offer in offers.offers]
    return document


def _offer(plan: Plan) -> dict[str, Any]:
    whole = planning.document(plan)
    kept = ("region", "groups", "price", "notices")
    label = choices.label(Target(plan.spec, plan.profile, plan.place))
    return {"offer": label, "zone": plan.spec.zone, **{key: whole[key] for key in kept}}


def ready_document(ready: Ready) -> dict[str, Any]:
    """Return the same of a run that is ready to be deployed as `Artefacts.document` of a dry one"""
    return {
        "run": ready.run.id,
        "run_uri": ready.uri,
        "radl": str(ready.path),
        "variables": None,
        "command": None,
        "image": ready.run.image,
    }


def plan_table(document: Mapping[str, Any], title: str = "nothing was made yet") -> Table:
    """Return a plan for people."""
    spec = document["spec"]
    trainer = spec["trainer"]
    where = f", region {document['region']}" if document["region"] else ""
    rows = [
        ("cloud", f"{document['cloud']}{where} ({document['exercised']})"),
        *(("nodes", _group_line(group, document["price"])) for group in document["groups"]),
        ("image", document.get("image")),
        ("program", trainer["program"]),
        ("training", f"{trainer['engine']}, {trainer['mode']}, {trainer['steps']:,} global steps"),
        ("data", spec["data"]["source"]),
        *_preprocess_row(spec["data"]["preprocess"]).items(),
        ("model", f"{document['run_uri']}model/" if document.get("run_uri") else None),
        ("creates", ", ".join(f"{count} {kind}" for kind, count in document["creates"].items())),
        *_price_rows(document["price"]),
        *_offer_rows(document),
        ("limits", _limits_line(document["limits"])),
        ("RADL", document.get("radl")),
        ("variables", document.get("variables")),
        ("run it by", document.get("command")),
        *(("note", notice) for notice in document["notices"]),
    ]
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in rows:
        if value:
            table.add_row(key, escape(str(value)))
    return table


def _group_line(group: Mapping[str, Any], price: Mapping[str, Any]) -> str:
    """`2 worker: g5.xlarge, 4 CPU, 16 GiB, 1 NVIDIA A10G, disk 50 GB, spot, 1.006 USD an hour`."""
    least = "at least " if group["at_least"] else ""
    parts = [
        group["type"],
        f"{least}{group['cpu']} CPU, {group['memory_mb'] / 1024:g} GiB" if group["cpu"] else None,
        f"{group['gpu']} {group['gpu_model'] or 'GPU'}" if group["gpu"] else None,
        f"disk {group['disk_gb']} GB" if group["disk_gb"] else None,
        "spot" if group["spot"] else None,
    ]
    if group["price_per_hour"] is not None and price.get("currency"):
        parts.append(f"{group['price_per_hour']:.4g} {price['currency']} an hour each")
    known = ", ".join(part for part in parts if part)
    return f"{group['count']} {group['group']}{': ' if known else ''}{known}"


def _offer_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One row for each offer of a job that has several."""
    if not document.get("order"):
        return []
    return [
        (f"offer {number}", f"{offer['offer']}: {_price_rows(offer['price'])[0][1]}")
        for number, offer in enumerate(document["offers"], start=1)
    ]


def _price_rows(price: Mapping[str, Any]) -> list[tuple[str, str]]:
    if price.get("free"):
        return [("price", "nothing")]
    if not price["known"]:
        return [("price", f"price unknown: {price['why']}")]
    low, high = price["hours"]
    rows = [
        ("price", f"{_money(price['per_hour'], price)} an hour"),
        ("the whole run", f"{_money(price['run'], price)} for {low:.1f} to {high:.1f} hours"),
    ]
    if price["spot_saves"]:
        rows.append(("spot workers", f"{_money(price['spot_saves'], price)} less for the run"))
    return [*rows, ("prices of", f"{price['date']}, {price['source']}")]


def price_line(plan: Plan) -> str:
    """Return the price of a plan on one line."""
    rows = _price_rows(planning.document(plan)["price"])
    return "; ".join(f"{key}: {text}" for key, text in rows)


def _money(amount: list[float], price: Mapping[str, Any]) -> str:
    """`0.31 to 1.20 USD`, with a third digit for small amounts."""
    low, high = (f"{value:.2f}" if value >= 1 or not value else f"{value:.3f}" for value in amount)
    return f"{low} {price['currency']}" if low == high else f"{low} to {high} {price['currency']}"


def _limits_line(limits: Mapping[str, Any]) -> str:
    parts = [
        f"training {duration(limits['max_duration'])} at most",
        f"{duration(limits['idle'])} without progress",
        f"budget {limits['budget']}" if limits["budget"] else None,
    ]
    return ", ".join(part for part in parts if part)


def clouds_document() -> list[dict[str, Any]]:
    """Return what each cloud can do, and how far it was exercised."""
    return [_cloud(load_cloud(name)) for name in known_clouds()]


def _cloud(profile: CloudProfile) -> dict[str, Any]:
    region = profile.settings.get("region")
    rule = profile.image
    return {
        "cloud": profile.name,
        "title": profile.title,
        "exercised": profile.exercised,
        "backend": profile.backend,
        "region": region.default if region else None,
        "settings": {name: list(value.environment) for name, value in profile.settings.items()},
        "image": rule.model_dump(mode="json") if rule else None,
        "user": profile.user,
        "instances": profile.instances,
        "types": {name: size.model_dump(mode="json") for name, size in profile.types.items()},
        "gpu": profile.gpu,
        "spot": profile.spot,
        "prices": profile.prices,
        "costs_money": profile.needs_confirmation,
        "bucket": profile.bucket,
        "quirks": list(profile.quirks),
    }


def clouds_table(documents: Iterable[Mapping[str, Any]]) -> Table:
    """Return the clouds for people."""
    table = Table(box=None, pad_edge=False)
    for title in ("CLOUD", "WHAT IT IS", "REGION", "TYPES", "GPU", "SPOT", "PRICES", "EXERCISED"):
        table.add_column(title, overflow="fold")
    for cloud in documents:
        table.add_row(
            cloud["cloud"],
            cloud["title"],
            cloud["region"] or "",
            str(len(cloud["types"])) if cloud["types"] else cloud["instances"],
            cloud["gpu"],
            "yes" if cloud["spot"] else "no",
            cloud["prices"] or "from a file",
            cloud["exercised"],
        )
    return table


def prices_table(prices: PriceList, origin: str, today: date) -> Table:
    """Return a price list for people."""
    age = prices.age(today)
    stale = ", which is old" if prices.is_stale(today) else ""
    where = f"{prices.cloud}, {prices.region or 'all regions'}"
    title = f"{where}: {prices.source}, {age} days old{stale}"
    table = Table(title=escape(f"{title} ({origin})"), title_justify="left")
    for column in ("TYPE", f"{prices.currency} AN HOUR", "SPOT, LATELY"):
        table.add_column(column)
    for name, price in prices.types.items():
        spot = f"{price.spot[0]:g} to {price.spot[1]:g}" if price.spot else ""
        table.add_row(name, f"{price.hour:g}", spot)
    extras = {
        "any other type": prices.other.hour if prices.other else None,
        "GB of disk for a month": prices.disk_gb_month,
        "public address for an hour": prices.address_hour,
        "GB out of the region": prices.transfer_gb,
    }
    for label, amount in extras.items():
        if amount is not None:
            table.add_row(label, f"{amount:g}", "")
    return table


def _preprocess_row(wanted: Mapping[str, Any] | None) -> dict[str, str]:
    return {"preprocess": f"to {wanted['to']}, by all workers"} if wanted else {}


def platform_document(made: LocalPlatform) -> dict[str, Any]:
    """Return what runs on this machine for CLOUD=local; no key is in it."""
    return {
        "im_url": made.im_url,
        "im_auth_file": str(made.im_auth_file),
        "docker_host": made.docker_host,
        "s3_endpoint": made.s3_endpoint,
        "image": made.image,
        "phases": {name: round(seconds, 2) for name, seconds in made.phases.items()},
        "reused": dict(made.reused),
    }


def platform_table(document: Mapping[str, Any]) -> Table:
    """Return the local platform for people: what was reused, and what was made in which time."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for part, reused in document["reused"].items():
        table.add_row(part, "reused" if reused else f"made in {duration(document['phases'][part])}")
    for key in ("im_url", "s3_endpoint", "docker_host", "image"):
        table.add_row(key, str(document[key]))
    return table


def services_table(document: Mapping[str, str | None]) -> Table:
    """Return the services of the local platform for people."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for part, where in document.items():
        table.add_row(part, where or "not running")
    return table
