"""HTTP servers of tests on loopback."""

import contextlib
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Handles requests without a log."""

    def reply(self, body, status=200, **headers):
        """Send an answer; `Content_Type` stands for the header `Content-Type`. A client that is gone is no error."""
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format, *args):  # noqa: A002 the name is the base class's
        """Write nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Write nothing of a client that ends a connection, or does not trust the certificate."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving(handler, port=0, certificate=None):
    """Serve requests in threads, with TLS where a certificate and its key are given; yields the URL."""
    with _Server(("127.0.0.1", port), handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
