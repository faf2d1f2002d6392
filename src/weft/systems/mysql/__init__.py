"""MySQL and MariaDB as a system."""
