"""Change data capture: envelopes are opened, the changes of a batch reduced to one a key, and applied as a set."""
