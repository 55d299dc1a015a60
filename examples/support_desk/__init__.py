"""A support desk whose users want short, complete answers on topic, and only rate them."""
