"""The learner's address: who is answered there."""

import http.client

import pytest
from prometheus_client import CollectorRegistry

from learner.status import serve_status


@pytest.mark.parametrize(
    ("token", "host", "status"),
    [
        ("", "localhost", 200),
        ("", "[::1]:8001", 200),
        ("", "elsewhere.example:8001", 403),
        ("secret", "elsewhere.example:8001", 200),
    ],
)
def test_without_a_token_no_page_is_answered_whose_name_was_made_to_lead_here(
    token: str, host: str, status: int
) -> None:
    with serve_status("127.0.0.1:0", token, CollectorRegistry(), list) as port:
        for path in ("/healthz", "/metrics"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", path, headers={"Host": host, "Authorization": "Bearer secret"})
            assert connection.getresponse().status == status
            connection.close()
