"""API keys as digests, and the names under which they are known within one server."""

from hashlib import sha256

from trouper.frontends.server.shared.settings import ServerSettings


def key_digests(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    """Hash all keys to one length, so that a comparison always takes the same time."""
    return tuple(sha256(key.encode()).digest() for key in keys)


def user_key_digests(settings: ServerSettings) -> tuple[bytes, ...]:
    """Return the digests of the keys that open the public routes: the API keys, and the admin key if there are any."""
    admin = () if settings.admin_key is None else (settings.admin_key,)
    return key_digests((*settings.api_keys, *admin)) if settings.api_keys else ()


def tenant_name(index: int) -> str:
    """Name a key by its place among those of the server.  Another run may have other keys there."""
    return f"key {index}"


def tenant_of(settings: ServerSettings, digest: bytes) -> str | None:
    """Return the name of the key with this digest.

    Returns None if no key has it any more.  Without keys all clients are one, with an empty digest.
    """
    known = user_key_digests(settings)
    if not known:
        return None if digest else ""
    return tenant_name(known.index(digest)) if digest in known else None
