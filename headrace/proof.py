"""Proof that the other end knows the run's token. The token is never sent; a proof is good for one challenge only."""

from __future__ import annotations

import hashlib
import hmac


def proof(token: str, *parts: str) -> str:
    """Shows that its writer knows the token and meant these parts. The first part names the exchange it belongs to, so that
    it cannot be replayed in another."""
    return hmac.new(token.encode(), "\0".join(parts).encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def is_proven(claim: object, token: str, *parts: object) -> bool:
    """Whether a claim, which may be anything that was received, is that proof."""
    expected = proof(token, *map(str, parts))
    return isinstance(claim, str) and hmac.compare_digest(claim.encode(errors="surrogatepass"), expected.encode())
