"""Float types of a model: widened to float32 when it is loaded, narrowed where a plan says so, and emulated exactly."""
