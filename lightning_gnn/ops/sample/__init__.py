"""Neighbor sampling: ``definition`` is the public function, ``reference`` the definition, the others are backends."""
