"""Read a template as OpenStack's Heat does. Runs in openstack-heat's own environment, not in ours.

Standard input is a JSON list of questions: a template's text, parameters, and the attributes that
resources would have in a cloud. Standard output is the list of answers: the resources' types, and
their properties with all functions resolved; or the error that Heat found. Only what needs a cloud
is left out: whether services, images, flavors, keys and networks exist there.
"""

import json
import sys
from unittest import mock

from heat.common import context, exception, template_format
from heat.engine import (
    constraints,
    environment,
    node_data,
    resource,
    resources,
    stack,
    stk_defn,
    template,
)
from heat.engine.resources.openstack.nova import server


def without_a_cloud():
    """Patches of all that asks a cloud."""
    yield mock.patch.object(constraints.CustomConstraint, "_is_valid", lambda *_: True)
    there = classmethod(lambda *_: (True, None))
    yield mock.patch.object(resource.Resource, "is_service_available", there)
    yield mock.patch.object(resource.Resource, "translation_rules", lambda *_: [])
    yield mock.patch.object(server.Server, "_validate_image_flavor", lambda *_: None)


def parse(asked):
    """The stack that Heat would make: template and parameters validated, nothing created."""
    parsed = template_format.parse(asked["template"])
    env = environment.Environment({"parameters": asked["parameters"]})
    user = context.RequestContext(user_id="u", project_id="p", username="n", is_admin=False)
    made = stack.Stack(user, "golden", template.Template(parsed, env=env))
    made.validate()
    return made


def properties(made, name):
    """A resource's properties, checked by its schema, with functions resolved."""
    own = made.resources[name]
    found = own.frozen_definition().properties(own.properties_schema, made.context)
    found.validate()
    return {key: found[key] for key in found if found.get(key) is not None}


def tell(made, name, attributes):
    """Let other resources see this one as created."""
    known = node_data.NodeData(0, name, None, f"id-of-{name}", attributes, "CREATE", "COMPLETE")
    stk_defn.update_resource_data(made.defn, name, known)


def answer(asked):
    """What Heat makes of one template."""
    made = parse(asked)
    found = {}
    # In Heat's own order of creation, each seen by those that come later.
    for own in made.dependencies:
        found[own.name] = properties(made, own.name)
        attributes = asked["attributes"].get(own.name, {})
        if own.type() == "OS::Heat::Value":
            attributes = {"value": found[own.name]["value"]}
        tell(made, own.name, attributes)
    return {
        "types": {name: own.type() for name, own in made.resources.items()},
        "properties": found,
        "outputs": sorted(made.outputs),
    }


def main():
    resources.initialise()
    for patch in without_a_cloud():
        patch.start()
    answers = []
    for asked in json.load(sys.stdin):
        try:
            answers.append(answer(asked))
        except (exception.HeatException, ValueError, KeyError, TypeError) as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(answers, sys.stdout, default=str)


if __name__ == "__main__":
    main()
