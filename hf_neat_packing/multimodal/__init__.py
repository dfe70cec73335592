"""Documents that carry images or video: their media, their positions, and their own masks.

`positions` numbers tokens on several axes with the model's own index function, `media` joins pixels
and grids and refuses documents that were cut inside an image, `own_masks` lets a model that looks
both ways inside an image say so in a 4-D mask. What a model needs is read once by `media_layout`;
the answer holds no model and pickles.
"""

from .layout import MediaLayout, media_layout
from .positions import PositionIndex

__all__ = ["MediaLayout", "PositionIndex", "media_layout"]
