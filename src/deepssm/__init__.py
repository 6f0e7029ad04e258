"""Deep state-space models that identify the dynamics behind sequences."""

from deepssm.errors import DeepSSMError

__version__ = "0.1.0"
__all__ = ["DeepSSMError", "__version__"]
