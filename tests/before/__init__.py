"""Files written by the previous version, and the run that wrote them."""
