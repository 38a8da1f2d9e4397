"""The sample of a mini-batch: ``definition`` is called, ``reference`` says what is computed, others are backends."""
