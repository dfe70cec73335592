"""What goes wrong, and which of the built-in families it belongs to.

```
NeatPackingError
├── BoundaryError        (ValueError)    document map, offsets, positions: invalid, or they disagree
├── PlanningError        (ValueError)    lengths and capacities that no plan can honour
├── ColumnError          (ValueError)    a dataset column that cannot be packed as it is
├── ContractError        (ValueError)    what the model declares and what the batch holds do not fit
├── UnsupportedAttentionError (ValueError)  an option that a kernel cannot compute and will not drop
├── UnsupportedModelError (RuntimeError) a built model that cannot take packed rows as it is
├── MissingDependencyError (ImportError) an optional package is not there
└── UnsupportedTransformersError (ImportError)  transformers lacks a name that this package stands on
```

Every message says what was found, why it would be wrong, what is accepted, and what to write. Users meet
these; a broken invariant of the package itself is an `assert`.
"""


class NeatPackingError(Exception):
    """Base of every error that the package raises on purpose."""


class BoundaryError(NeatPackingError, ValueError):
    """A document map, offsets or positions are invalid, or two sources of boundaries disagree."""


class PlanningError(NeatPackingError, ValueError):
    """Lengths and capacities that no plan can honour."""


class ColumnError(NeatPackingError, ValueError):
    """A dataset column that cannot be packed as it is."""


class ContractError(NeatPackingError, ValueError):
    """What a model declares and what a batch or a configuration holds do not fit together."""


class UnsupportedAttentionError(NeatPackingError, ValueError):
    """An attention option that the chosen kernel cannot compute and that must not be dropped."""


class UnsupportedModelError(NeatPackingError, RuntimeError):
    """A built model that cannot take packed rows exactly as it is."""


class MissingDependencyError(NeatPackingError, ImportError):
    """An optional package is needed for this feature; the message names the extra to install."""


class UnsupportedTransformersError(NeatPackingError, ImportError):
    """The installed transformers lacks a name that this package stands on."""
