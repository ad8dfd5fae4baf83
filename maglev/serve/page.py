"""The page at /, from one file of the package: no other asset, and a policy that lets no other script run."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response


def page_response() -> Response:
    content = (files("maglev.serve") / "web" / "index.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": hash_of(content, "script"),
        "style-src": hash_of(content, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(content, headers=headers, media_type="text/html")


def hash_of(page: str, tag: str) -> str:
    """Of the one element of this kind, as a source of a content security policy."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
