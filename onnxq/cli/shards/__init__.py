"""The commands of a calibration in shards."""
