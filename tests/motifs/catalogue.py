"""All motifs."""

from tests.motifs import attending, controlling, convolving, multiplying, normalizing, resizing, selecting
from tests.motifs.net import Motif

_MODULES = (resizing, convolving, normalizing, multiplying, attending, selecting, controlling)
MOTIFS: tuple[Motif, ...] = tuple(motif for module in _MODULES for motif in module.MOTIFS)
