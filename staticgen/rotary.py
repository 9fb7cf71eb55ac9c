"""How cached keys turn with their position, so that a layout can move tokens to other positions.

A rotary embedding turns pairs of a key's numbers by an angle that grows with the position. Turning a cached key by
``delta`` more positions makes it the key of the same token ``delta`` positions later. Which numbers are pairs, and how
fast each pair turns, is not read from a config: it is one of the model's own frequency tables in one of two
arrangements, and the one that predicts the model's own keys is it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one layer's keys.

    Attributes:
        frequencies: float64 [R / 2], radians per position of each pair; the first R numbers of a key turn.
        interleaved: pairs are (0, 1), (2, 3) ...; otherwise (0, R / 2), (1, R / 2 + 1) ...
    """

    frequencies: torch.Tensor
    interleaved: bool

    def apply_(self, keys: torch.Tensor, delta: int, token_dim: int = -2) -> None:
        """Turn keys by ``delta`` positions, in place: [..., tokens, D], or [..., D, tokens] with ``token_dim`` -1."""
        features = keys if token_dim == -2 else keys.transpose(-1, -2)
        half = len(self.frequencies)
        if self.interleaved:
            first, second = features[..., 0 : 2 * half : 2], features[..., 1 : 2 * half : 2]
        else:
            first, second = features[..., :half], features[..., half : 2 * half]
        angles = self.frequencies * delta
        cos, sin = angles.cos().to(keys), angles.sin().to(keys)
        lifted = first * sin
        first.mul_(cos).sub_(second * sin)
        second.mul_(cos).add_(lifted)


def find_rotation(
    keys: Sequence[tuple[int, torch.Tensor]], known: Iterable[Rotation], tolerance: float
) -> Rotation | None:
    """The rotation that explains one layer's keys.

    Args:
        keys: of the same tokens at several positions, the first of them 0: (position, [tokens, K, D]).
        known: those that may be it.
        tolerance: largest difference that counts as equal, as a part of the largest number.

    Returns:
        One of ``known``; None when the keys do not depend on the position.

    Raises:
        LookupError: the keys depend on it in another way.
    """
    (_, base), *others = [(position, key.double()) for position, key in keys]
    limit = tolerance * float(base.abs().max())

    def explains(rotation: Rotation | None) -> bool:
        for position, key in others:
            turned = base.clone()
            if rotation is not None:
                rotation.apply_(turned, position)
            if float((turned - key).abs().max()) > limit:
                return False
        return True

    if explains(None):
        return None
    for rotation in known:
        if 2 * len(rotation.frequencies) <= base.shape[-1] and explains(rotation):
            return rotation
    raise LookupError("no frequency table of the model explains how its keys change with their position")
