"""The template (HOT) of a job: a dict, built resource by resource, and its text.

Reference: https://docs.openstack.org/heat/latest/template_guide/
"""

from __future__ import annotations

from typing import Any

import yaml

from mayfly.heat.job import ACCELERATORS, BOOT_S, LONGEST_WAIT_S, ONE_LINE, REF, SHORTEST_S, HeatJob
from mayfly.heat.user_data import common_user_data, joined, node_user_data

VERSION = "2018-08-31"  # Rocky: the first with all functions used here, and older than most clouds
MARK = "Mayfly"  # how a stack's description begins; `mayfly heat delete` looks for it
PORT = 29400  # torchrun's default for the rendezvous
# Heat's defaults (max_resources_per_stack, max_template_size); operators may set others.
MAX_RESOURCES = 1000
MAX_BYTES = 512 * 1024


def build(job: HeatJob) -> dict[str, Any]:
    """The whole template."""
    return {
        "heat_template_version": VERSION,
        "description": _description(job),
        "parameter_groups": _groups(job),
        "parameters": _parameters(job),
        "resources": {**_network(), **_access(), "launcher": _launcher(job), **_nodes(job)},
        "outputs": _outputs(job),
    }


def dump(template: dict[str, Any]) -> str:
    """The template as YAML text: ASCII, with scripts as literal blocks."""
    return yaml.dump(template, Dumper=_Dumper, sort_keys=False, width=1000)


def notices(job: HeatJob, text: str) -> list[str]:
    """What a cloud with Heat's default limits would refuse."""
    resources = len(build(job)["resources"])
    found = []
    if resources > MAX_RESOURCES:
        found.append(f"{resources} resources; Heat's default limit is {MAX_RESOURCES} for a stack")
    if len(text) > MAX_BYTES:
        found.append(f"{len(text)} bytes; Heat's default limit is {MAX_BYTES} for a template")
    return found


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as it is, and every mapping in full."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _literal(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _literal)


# --- the form ---------------------------------------------------------------------------------


def _parameters(job: HeatJob) -> dict[str, Any]:
    path = r"(?![/~-])(?!.*\.\.)" + ONE_LINE
    found = {
        "repository": _text(
            "HTTPS URL of the Git repository to clone", job.repository, r"https://[^\s@/]+/[^\s@]+"
        ),
        "ref": _text("Branch, tag or commit; empty for the default branch", job.ref, REF),
        "directory": _text("Directory of requirements.txt (. for the root)", job.directory, path),
        "entrypoint": _text("Python file, seen from that directory", job.entrypoint, path),
        "arguments": _text("Arguments of the Python file", job.arguments, ONE_LINE),
        "image": _known("Image of all nodes", job.image, "glance.image"),
        "image_user": _text("Who logs in to that image", job.image_user, r"[a-z_][a-z0-9_-]*"),
        "main_flavor": _known("Flavor of the main node", job.main_flavor, "nova.flavor"),
        "worker_flavor": _known("Flavor of the workers", job.worker_flavor, "nova.flavor"),
        "key": _known("Key pair for SSH", job.key or None, "nova.keypair"),
        "processes": _number("Processes on each node; one for each GPU", job.processes, (1, 1024)),
        "accelerator": {
            **_parameter("string", "What processes compute on", job.accelerator),
            "constraints": [{"allowed_values": list(ACCELERATORS)}],
        },
        "max_duration": _number(
            "Seconds after which a node ends whatever happens; at most what was rendered",
            job.max_duration,
            (SHORTEST_S, job.max_duration),
        ),
        "external_network": _known(
            "Network with a way out", job.external_network, "neutron.network"
        ),
        "subnet_cidr": _known("The stack's own subnet", job.cidr, "net_cidr"),
        "main_address": _known("Main node's address in it", job.main_address, "ip_addr"),
        "dns_servers": _list("Name servers of the subnet", job.dns),
        "ssh_from": _known("Network from which SSH is let in", job.ssh_from, "net_cidr"),
        "security_groups": _list("Further security groups of all nodes", job.security_groups),
    }
    if job.reservation:
        found["reservation"] = _known("Reservation", job.reservation, "blazar.reservation")
    if job.results:
        found |= _results_parameters(job)
    return found


def _results_parameters(job: HeatJob) -> dict[str, Any]:
    secret = {"type": "string", "hidden": True}
    return {
        "results": _text(
            "Where logs and results go: s3://bucket/prefix/", job.results, r"s3://[\w.-]+/\S*"
        ),
        "s3_endpoint": _text(
            "Address of the S3 service; empty for Amazon's",
            job.s3_endpoint or "",
            r"(https?://[^\s@]+)?",
        ),
        "s3_region": _text("Region of the S3 service", job.s3_region, r"[A-Za-z0-9-]+"),
        "s3_access_key_id": {**secret, "description": "Key id of the S3 service"},
        "s3_secret_access_key": {**secret, "description": "Secret key of the S3 service"},
    }


def _groups(job: HeatJob) -> list[dict[str, Any]]:
    program = ["repository", "ref", "directory", "entrypoint", "arguments"]
    machines = ["key", "image", "image_user", "main_flavor", "worker_flavor"]
    if job.reservation:
        machines.append("reservation")
    network = ["external_network", "subnet_cidr", "main_address", "dns_servers"]
    groups = {
        "Program": program,
        "Machines": machines,
        "Training": ["processes", "accelerator", "max_duration"],
        "Network": [*network, "ssh_from", "security_groups"],
    }
    if job.results:
        groups["Results"] = list(_results_parameters(job))
    return [{"label": label, "parameters": names} for label, names in groups.items()]


def _parameter(kind: str, description: str, default: Any) -> dict[str, Any]:
    found = {"type": kind, "description": description}
    return found if default is None else {**found, "default": default}


def _text(description: str, default: str | None, pattern: str) -> dict[str, Any]:
    constraints = [{"allowed_pattern": pattern}]
    return {**_parameter("string", description, default), "constraints": constraints}


def _number(description: str, default: int, limits: tuple[int, int]) -> dict[str, Any]:
    constraints = [{"range": {"min": limits[0], "max": limits[1]}}]
    return {**_parameter("number", description, default), "constraints": constraints}


def _known(description: str, default: str | None, constraint: str) -> dict[str, Any]:
    constraints = [{"custom_constraint": constraint}]
    return {**_parameter("string", description, default), "constraints": constraints}


def _list(description: str, default: tuple[str, ...]) -> dict[str, Any]:
    return _parameter("comma_delimited_list", description, ",".join(default))


# --- network ----------------------------------------------------------------------------------


def _network() -> dict[str, Any]:
    return {
        "network": _resource("OS::Neutron::Net", {"name": _named("network")}),
        "subnet": _resource(
            "OS::Neutron::Subnet",
            {
                "network": _get("network"),
                "cidr": _param("subnet_cidr"),
                "ip_version": 4,
                "dns_nameservers": _param("dns_servers"),
            },
        ),
        "router": _resource(
            "OS::Neutron::Router",
            {
                "name": _named("router"),
                "external_gateway_info": {"network": _param("external_network")},
            },
        ),
        "router_interface": _resource(
            "OS::Neutron::RouterInterface", {"router": _get("router"), "subnet": _get("subnet")}
        ),
    }


def _access() -> dict[str, Any]:
    ssh = {
        "protocol": "tcp",
        "port_range_min": 22,
        "port_range_max": 22,
        "remote_ip_prefix": _param("ssh_from"),
    }
    return {
        "security_group": _resource(
            "OS::Neutron::SecurityGroup",
            {
                "name": _named("nodes"),
                "description": "SSH from outside, everything between the stack's own nodes",
                # Without remote_group_id the rule means this very group.
                "rules": [ssh, {"remote_mode": "remote_group_id"}],
            },
        ),
        "main_port": _resource(
            "OS::Neutron::Port",
            {
                "network": _get("network"),
                "fixed_ips": [{"subnet": _get("subnet"), "ip_address": _param("main_address")}],
                "security_groups": _security_groups(),
            },
        ),
        "floating_ip": _resource(
            "OS::Neutron::FloatingIP",
            {"floating_network": _param("external_network"), "port_id": _get("main_port")},
            ["router_interface"],
        ),
    }


def _security_groups() -> dict[str, Any]:
    return {"list_concat": [[_get("security_group")], _param("security_groups")]}


# --- nodes ------------------------------------------------------------------------------------


def node_names(job: HeatJob) -> list[str]:
    """The resources' names of all nodes; the place in the list is the node's rank."""
    return ["main", *(f"worker_{number}" for number in range(1, job.workers + 1))]


def _nodes(job: HeatJob) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, name in enumerate(node_names(job)):
        found |= _node(job, name, rank)
    return found


def _node(job: HeatJob, name: str, rank: int) -> dict[str, Any]:
    """A server, the address where it reports, and the wait for its report."""
    main = rank == 0
    properties = {
        "name": _named(name.replace("_", "-")),
        "image": _param("image"),
        "flavor": _param("main_flavor" if main else "worker_flavor"),
        "key_name": _param("key"),
        "networks": [{"port": _get("main_port")} if main else {"network": _get("network")}],
        **({} if main else {"security_groups": _security_groups()}),
        **({"scheduler_hints": {"reservation": _param("reservation")}} if job.reservation else {}),
        "user_data_format": "RAW",
        "user_data": node_user_data(
            {"get_attr": ["launcher", "value"]}, _node_document(job, name, rank)
        ),
    }
    condition = {"handle": _get(f"{name}_signal"), "timeout": _wait_s(job)}
    needs = ["router_interface"] if main else ["router_interface", "main"]
    return {
        f"{name}_signal": _resource("OS::Heat::WaitConditionHandle"),
        name: _resource("OS::Nova::Server", properties, needs),
        f"{name}_{job.waits_for}": _resource("OS::Heat::WaitCondition", condition, [name]),
    }


def _wait_s(job: HeatJob) -> int:
    """Seconds that Heat waits for a node after its server was made."""
    return BOOT_S + (job.max_duration if job.waits_for == "trained" else LONGEST_WAIT_S)


def _node_document(job: HeatJob, name: str, rank: int) -> dict[str, Any]:
    """What is one node's own; what must not be shown with the stack's resources is here too."""
    document = {
        "name": name.replace("_", "-"),
        "rank": rank,
        "signal": {"get_attr": [f"{name}_signal", "curl_cli"]},
    }
    secrets = ("s3_access_key_id", "s3_secret_access_key") if job.results else ()
    return {**document, **{key: _param(key) for key in secrets}}


def _launcher(job: HeatJob) -> dict[str, Any]:
    """What all nodes run, held once: repeated in 250 nodes it would pass Heat's size limit."""
    asked = ["repository", "ref", "directory", "entrypoint", "arguments", "processes"]
    asked += ["accelerator", "main_address", "max_duration"]
    if job.results:
        asked += ["results", "s3_endpoint", "s3_region"]
    document = {
        "stack": _param("OS::stack_name"),
        "nodes": len(node_names(job)),
        "port": PORT,
        "launcher": job.launcher,
        "start_timeout": job.start_timeout,
        "waits_for": job.waits_for,
        "keep": job.keep,
        **{name: _param(name) for name in asked},
    }
    properties = {"type": "string", "value": common_user_data(document, keep=job.keep)}
    return _resource("OS::Heat::Value", properties)


# --- texts ------------------------------------------------------------------------------------


def _description(job: HeatJob) -> str:
    meaning = (
        "CREATE_COMPLETE means that every node trained to the end"
        if job.waits_for == "trained"
        else "CREATE_COMPLETE means that training started; logs and results tell its end"
    )
    end = "stay on" if job.keep else "power off by themselves"
    return (
        f"{MARK}: distributed PyTorch training on {job.machines}. {meaning}."
        f" The nodes {end}; network, router and floating IP stay until the stack is deleted."
    )


def _outputs(job: HeatJob) -> dict[str, Any]:
    address = {"get_attr": ["floating_ip", "floating_ip_address"]}
    stack = _param("OS::stack_name")
    follow = joined("ssh ", _param("image_user"), "@", address, " tail -F /var/log/mayfly.log")
    condition = job.waits_for
    return {
        "main_address": {"description": "Public address of the main node", "value": address},
        "follow_log": {"description": "Follow the main node's log", "value": follow},
        "nodes": {
            "description": "What each node reported",
            "value": {
                name: {"get_attr": [f"{name}_{condition}", "data"]} for name in node_names(job)
            },
        },
        "delete": {
            "description": "Delete network, router, floating IP and nodes: the one command",
            "value": joined("openstack stack delete --yes --wait ", stack),
        },
    }


def _resource(
    kind: str, properties: dict[str, Any] | None = None, depends_on: list[str] | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {"type": kind}
    if properties:
        found["properties"] = properties
    if depends_on:
        found["depends_on"] = depends_on
    return found


def _named(part: str) -> dict[str, Any]:
    return joined(_param("OS::stack_name"), f"-{part}")


def _get(resource: str) -> dict[str, Any]:
    return {"get_resource": resource}


def _param(name: str) -> dict[str, Any]:
    return {"get_param": name}
