"""Rules that processes of one device share: which layers, which messages."""
