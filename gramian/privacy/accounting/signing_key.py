"""The key that signs what a private run says about itself: Ed25519, from the package `cryptography`.

It is made from the first secret key of a run by a one-way function and, unlike that key, stays the same over resumes.
"""

import hashlib
from typing import Any

import torch

from gramian.core.errors import GramianError

BYTES = 32


class SigningKey:
    """An Ed25519 key pair; `repr`, copies and pickles do not show the secret half.

    Args:
        secret: its 32 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @property
    def public(self) -> str:
        """The public half, 64 hexadecimal digits, with which anybody can check a signature."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        public: bytes = self._pair().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return public.hex()

    def sign(self, message: bytes) -> str:
        """The signature of a message, 128 hexadecimal digits."""
        signature: bytes = self._pair().sign(message)
        return signature.hex()

    def _pair(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._secret)

    def state(self) -> torch.Tensor:
        """The secret half as uint8 [32], for a file of mode 0600."""
        return torch.tensor(list(self._secret), dtype=torch.uint8)

    @classmethod
    def of(cls, state: Any) -> "SigningKey":
        """The key of a `state`; a `GramianError` if it is none."""
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or list(state.shape) != [BYTES]:
            raise GramianError(
                f"signing key: missing or of another shape; expected a uint8 tensor of {BYTES} in the state"
            )
        return cls(bytes(state.tolist()))

    def subkey(self, label: str) -> bytes:
        """A 32-byte key for one purpose that is as lasting, and as secret, as this key."""
        return hashlib.blake2b(label.encode(), digest_size=32, key=self._secret, person=b"gramian lasting").digest()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GramianError("signing key: copies and pickles are refused; expected state() in a file of mode 0600")


def is_signed(message: bytes, signature: str, public: str) -> bool:
    """True if a signature of a message (hexadecimal digits) was made with the secret half of `public`.

    Raises:
        GramianError: if `public` is no public key.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    except ValueError:
        raise GramianError(f"key: {public[:80]!r} is not a public key; expected 64 hexadecimal digits") from None
    try:
        key.verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
