"""OpenStack credentials: a cloud of `clouds.yaml`, or the variables of an openrc file.

Password and application credential: what IM's connector (Apache Libcloud) can use. The rules for
files and names: docs.openstack.org, "Configuring OpenStack SDK Applications".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mayfly.auth.credential import Identity, Missing
from mayfly.auth.entry import Entry
from mayfly.auth.web import Answer, call
from mayfly.errors import RemoteError, UserError, unknown
from mayfly.redact import Secret

DIRECTORIES = (".", "~/.config/openstack", "/etc/openstack")
HINT = "set OS_CLOUD to a cloud of your clouds.yaml, or source your project's openrc.sh"
PASSWORD = ("auth_url", "username", "password", "project_name")
APPLICATION = ("auth_url", "application_credential_id", "application_credential_secret")


@dataclass(frozen=True)
class OpenStack:
    """A user or an application credential of one Keystone."""

    url: str  # of Keystone, without /v3
    user: str  # user name, or the application credential's id
    secret: Secret
    project: str | None  # None: an application credential belongs to one
    user_domain: str
    project_domain_id: str
    region: str | None
    verify: bool | str  # whether certificates are checked, or by which authority's file
    origin: str

    def entry(self) -> Entry:
        fields: dict[str, str | Secret] = {
            "host": self.url,
            "username": self.user,
            "password": self.secret,
            # IM wants a tenant in any case, and Libcloud ignores it for an application credential.
            "tenant": self.project or "of-the-application-credential",
            "auth_version": "3.x_password" if self.project else "3.x_appcred",
        }
        if self.project:
            fields |= {"domain": self.user_domain, "tenant_domain_id": self.project_domain_id}
        if self.region:
            fields["service_region"] = self.region
        return Entry("OpenStack", "ost", fields)

    def identify(self) -> Identity:
        """Ask Keystone for a token, as IM will (docs.openstack.org: Identity API v3)."""
        url = f"{self.url}/v3/auth/tokens"
        answer = call("Keystone", "POST", url, json=self._question(), verify=self.verify)
        token = answer.document().get("token")
        if not answer.ok or not isinstance(token, dict):
            raise self._refusal(answer)
        user, project = (str(token.get(k, {}).get("name", "?")) for k in ("user", "project"))
        return Identity(f"project {project}, user {user} at {self.url}", answer.clock_skew_s)

    def _question(self) -> dict[str, Any]:
        if not self.project:
            application = {"id": self.user, "secret": self.secret.reveal()}
            methods = {"methods": ["application_credential"], "application_credential": application}
            return {"auth": {"identity": methods}}
        domain = {"name": self.user_domain}
        user = {"name": self.user, "password": self.secret.reveal(), "domain": domain}
        project = {"name": self.project, "domain": {"id": self.project_domain_id}}
        identity = {"methods": ["password"], "password": {"user": user}}
        return {"auth": {"identity": identity, "scope": {"project": project}}}

    def _refusal(self, answer: Answer) -> UserError | RemoteError:
        if answer.status in (401, 403):
            return UserError(f"Keystone at {self.url} refuses {self.user}", f"check {self.origin}")
        what = f"what answers at {self.url} is no Keystone: status {answer.status}"
        return RemoteError(what, f"check auth_url of {self.origin}")


def find(environ: Mapping[str, str]) -> OpenStack:
    """The cloud that OS_CLOUD names, or the one of the other OS_* variables.

    Raises Missing that names what is not there, UserError for what IM cannot use.
    """
    name = environ.get("OS_CLOUD", "").strip()
    if name:
        settings = _from_file(name, environ)
        origin = f"clouds.yaml ({name})"
        return _credential(settings, origin, lambda key: f"{key} of {name} in clouds.yaml")
    values = {key[3:].lower(): value.strip() for key, value in environ.items() if key[:3] == "OS_"}
    settings = {key: value for key, value in values.items() if value}
    settings.setdefault("project_name", settings.get("tenant_name", ""))
    if not settings.get("auth_url"):
        raise Missing("no OpenStack credentials", ["OS_CLOUD or OS_AUTH_URL"], HINT)
    return _credential(settings, "OS_*", lambda key: f"OS_{key.upper()}")


def _credential(settings: Mapping[str, Any], origin: str, named: Callable[[str], str]) -> OpenStack:
    kind = str(settings.get("auth_type") or "").removeprefix("v3")
    application = kind == "applicationcredential" or bool(settings.get(APPLICATION[1]))
    if not application and kind not in ("", "password"):
        advice = "use a password or an application credential: IM can do no other"
        raise UserError(f"{named('auth_type')} is {settings['auth_type']!r}", advice)
    needed = APPLICATION if application else PASSWORD
    missing = [named(key) for key in needed if not settings.get(key)]
    if missing:
        raise Missing("OpenStack credentials are not complete", missing, HINT)
    url, user, secret = (str(settings[key]) for key in needed[:3])
    verify = settings.get("verify", True) not in (False, "false", "False")
    return OpenStack(
        url=_base(url),
        user=user,
        secret=Secret(secret),
        project=None if application else str(settings["project_name"]),
        user_domain=_user_domain(settings, named),
        project_domain_id=_project_domain_id(settings, named),
        region=str(settings.get("region_name") or "") or None,
        verify=str(settings["cacert"]) if verify and settings.get("cacert") else verify,
        origin=origin,
    )


def _user_domain(settings: Mapping[str, Any], named: Callable[[str], str]) -> str:
    """The name of the user's domain; Libcloud takes no identifier for it."""
    keys = ("user_domain_name", "domain_name", "default_domain_name")
    name = next((str(settings[key]) for key in keys if settings.get(key)), None)
    if name is None and settings.get("user_domain_id") not in (None, "default"):
        raise Missing("IM wants a domain's name", [named("user_domain_name")], HINT)
    return name or "Default"


def _project_domain_id(settings: Mapping[str, Any], named: Callable[[str], str]) -> str:
    """The identifier of the project's domain; Libcloud takes no name for it."""
    if settings.get("project_domain_id"):
        return str(settings["project_domain_id"])
    if settings.get("project_domain_name") not in (None, "Default", "default"):
        raise Missing("IM wants a domain's identifier", [named("project_domain_id")], HINT)
    return "default"


def _base(url: str) -> str:
    """Keystone's address without the version, which Libcloud adds."""
    return url.rstrip("/").removesuffix("/v3")


def _from_file(name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of one cloud, those of its `auth` beside the others."""
    path = _found("clouds.yaml", environ, "OS_CLIENT_CONFIG_FILE")
    if path is None:
        raise Missing(f"there is no clouds.yaml for OS_CLOUD {name!r}", ["clouds.yaml"], HINT)
    clouds = _clouds(path)
    if name not in clouds:
        raise unknown("cloud in clouds.yaml", name, clouds, "set OS_CLOUD to one of them")
    secure = _found("secure.yaml", environ, "OS_CLIENT_SECURE_FILE")
    layers = [clouds[name], _clouds(secure).get(name, {}) if secure else {}]
    settings: dict[str, Any] = {}
    for layer in layers:
        settings |= {key: value for key, value in layer.items() if key != "auth"}
        settings |= layer.get("auth") or {}
    if environ.get("OS_REGION_NAME"):
        settings["region_name"] = environ["OS_REGION_NAME"]
    return settings


def _found(file: str, environ: Mapping[str, str], variable: str) -> Path | None:
    """The file that `variable` names, or the first in the usual directories."""
    home = environ.get("HOME", "~")
    places = [Path(directory.replace("~", home)) / file for directory in DIRECTORIES]
    if environ.get(variable):
        places.insert(0, Path(environ[variable]))
    return next((place for place in places if place.is_file()), None)


def _clouds(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} cannot be read", "correct it") from None
    except yaml.YAMLError:
        # The parser's error would carry the line, and with it a password.
        raise UserError(f"{path} is not YAML", "correct it") from None
    clouds = content.get("clouds") if isinstance(content, dict) else None
    return clouds if isinstance(clouds, dict) else {}
