"""Whom a user's Datastore may have the controller ask, and that an administrator's class is not bound by it.

That it is not asked: tests/hostile/test_addresses.py.
"""

from __future__ import annotations

from datastore.api.endpoints import EndpointPolicy
from datastore.controller.datastores.effective import effective_spec
from datastore.controller.datastores.settings import Settings
from tests.promises import promise
from tests.unit.controller.datastores.test_effective import OF_CLASS, SHARED, body, refused, storage_class


@promise("S-116")
def test_it_holds_for_users_and_not_for_the_administrators_classes() -> None:
    only = Settings(policy=EndpointPolicy(endpoints=("https://s3.example.org",)))
    inside = {"bucket": "digits", "credentialsSecret": "keys", "endpoint": "http://10.0.0.1:2379"}
    assert effective_spec(body({"s3": inside}), None, Settings()).spec.s3 is not None
    text = refused({"s3": inside}, settings=only)
    assert text == "EndpointNotAllowed: spec.s3.endpoint: the administrator does not allow http://10.0.0.1:2379"
    classed = storage_class(**SHARED, endpoint="http://10.0.0.1:9000")
    assert effective_spec(body(OF_CLASS), classed, only).spec.s3 is not None
