"""The proxy in front of a SuperLink, as a configuration for nginx."""

from __future__ import annotations

import re
from pathlib import Path

from fedspan.errors import ConfigError


def nginx(server: Path, host: str, listen: int = 443, port: int = 8000, body_mb: int = 8) -> str:
    """TLS to the outside, only the fleet API behind it, and limits on size, time and number of requests.

    Flower's control API has no access control: whoever reaches it can run code on the nodes. And a SuperLink reads
    whole requests before it looks at who sends them. So neither may be reached from outside but through this.
    """
    if not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", host):
        raise ConfigError(f"deploy proxy: --host must be a name or an address. Got {host[:60]!r}.")
    for name, value in (("listen", listen), ("port", port)):
        if not 1 <= value <= 65535:
            raise ConfigError(f"deploy proxy: --{name} must lie in 1..65535. Got {value}.")
    return f"""# Save as /etc/nginx/conf.d/fedspan.conf, check with `nginx -t`, reload. Made by `fedspan deploy proxy`.
limit_req_zone $binary_remote_addr zone=fedspan_rate:1m rate=50r/s;
limit_conn_zone $binary_remote_addr zone=fedspan_many:1m;

server {{
    listen {listen} ssl;
    server_name {host};
    ssl_certificate {server}/server.crt;
    ssl_certificate_key {server}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    server_tokens off;

    # Flower sends arrays in pieces of 5 MiB: a longer request is none of its.
    client_max_body_size {body_mb}m;
    client_body_timeout 30s;
    client_header_timeout 10s;
    limit_req zone=fedspan_rate burst=200;
    limit_conn fedspan_many 32;

    # What nodes need, and nothing else: no control, no runtime, no documentation.
    location ~ ^/v1/fleet/[a-z-]+$ {{
        limit_except POST {{ deny all; }}
        proxy_pass https://127.0.0.1:{port};
        proxy_ssl_trusted_certificate {server}/ca.crt;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_ssl_server_name on;
        proxy_http_version 1.1;
        proxy_set_header Host $host;
        proxy_set_header Connection "";
        proxy_read_timeout 300s;
    }}
    location / {{
        return 404;
    }}
}}
"""
