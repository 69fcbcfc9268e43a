"""An Azure service principal, by the variables that Azure's own SDKs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mayfly.auth.credential import Identity, require
from mayfly.auth.entry import Entry
from mayfly.auth.web import call
from mayfly.errors import UserError
from mayfly.redact import Secret

NAMES = ("AZURE_SUBSCRIPTION_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET")
AUTHORITY = "https://login.microsoftonline.com"
SCOPE = "https://management.azure.com/.default"


@dataclass(frozen=True)
class Azure:
    """A service principal and the subscription that it works in."""

    subscription: str
    tenant: str
    client: str
    secret: Secret
    origin: str = "AZURE_*"

    def entry(self) -> Entry:
        fields: dict[str, str | Secret] = {
            "subscription_id": self.subscription,
            "tenant": self.tenant,
            "client_id": self.client,
            "secret": self.secret,
        }
        return Entry("Azure", "azure", fields)

    def identify(self) -> Identity:
        """Ask for a token (learn.microsoft.com: OAuth 2.0 client credentials flow).

        It says nothing of the subscription, which is not asked for.
        """
        form = {
            "grant_type": "client_credentials",
            "client_id": self.client,
            "client_secret": self.secret.reveal(),
            "scope": SCOPE,
        }
        url = f"{AUTHORITY}/{self.tenant}/oauth2/v2.0/token"
        answer = call("Azure", "POST", url, data=form)
        if not answer.ok:
            said = answer.document()
            codes = "".join(f" AADSTS{code}" for code in said.get("error_codes", [])[:1])
            raise UserError(
                f"Azure refuses the service principal: {said.get('error', answer.status)}{codes}",
                f"check {', '.join(NAMES[1:])}",
            )
        who = f"service principal {self.client} of tenant {self.tenant}"
        return Identity(f"{who}; subscription {self.subscription} not tried", answer.clock_skew_s)


def find(environ: Mapping[str, str]) -> Azure:
    """The service principal in the environment. Raises Missing that names what is not set."""
    hint = "`az ad sp create-for-rbac` makes a service principal"
    subscription, tenant, client, secret = require(environ, NAMES, "no Azure credentials", hint)
    return Azure(subscription, tenant, client, Secret(secret))
