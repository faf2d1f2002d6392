"""Speed, each number as a ratio to a yardstick of the same run. `python -m bench --help`."""
