"""The packed format: what its files hold, reading and verifying them."""
