"""The finished model: the plan's pairs written, with the guards that an engine needs."""
