"""Running what is declared: when it is due, who runs it, what became of it, and who is told."""
