"""Packages on top of the core: users import them by the public names ``ringcomm.moe`` and so on."""
