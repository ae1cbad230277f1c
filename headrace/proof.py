"""Proof that the other end knows the run's token. The token itself never travels: what does is good for one challenge only."""

from __future__ import annotations

import hashlib
import hmac


def proof(token: str, *parts: str) -> str:
    """That whoever wrote this knows the token, and meant these parts. The first says which exchange it belongs to, so that
    none can be played back in another."""
    return hmac.new(token.encode(), "\0".join(parts).encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def is_proven(claim: object, token: str, *parts: object) -> bool:
    """Whether a claim, which may be anything that was sent, is that proof."""
    expected = proof(token, *map(str, parts))
    return isinstance(claim, str) and hmac.compare_digest(claim.encode(errors="surrogatepass"), expected.encode())
