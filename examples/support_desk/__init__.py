"""A support desk whose users want short, complete, on-topic answers and never say so."""
