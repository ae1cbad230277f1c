"""Proof that a peer knows the run's token. The token is never sent; a proof is valid for one challenge only."""

from __future__ import annotations

import hashlib
import hmac


def proof(token: str, *parts: str) -> str:
    """An HMAC of the parts under the token. The first part names the exchange, so that it cannot be replayed in another."""
    return hmac.new(token.encode(), "\0".join(parts).encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def is_proven(claim: object, token: str, *parts: object) -> bool:
    """Whether a received claim, which may be of any type, is that proof."""
    expected = proof(token, *map(str, parts))
    return isinstance(claim, str) and hmac.compare_digest(claim.encode(errors="surrogatepass"), expected.encode())
