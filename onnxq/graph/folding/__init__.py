"""Constants computed once: nodes that do not depend on the inputs become initializers."""
