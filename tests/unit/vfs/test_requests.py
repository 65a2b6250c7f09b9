"""How many requests a call costs: what is known is not asked for."""

from __future__ import annotations

from tests.mounted import Client, World

FILES = 40


def test_a_rename_does_not_list_the_directory_again(world: World, one: Client) -> None:
    """S-25 each is a copy and a delete."""
    for number in range(FILES):
        one.local.write(f"f{number:02}", b"")
    one.local.listdir()
    listings = one.calls("list_page")
    for number in range(FILES):
        one.local.rename(f"f{number:02}", f"g{number:02}")
    assert one.calls("list_page") == listings
    assert one.calls("copy") == one.calls("delete") == FILES
    assert one.local.listdir() == [b"g%02d" % number for number in range(FILES)]


def test_attributes_that_were_asked_for_ahead_are_asked_for_once(world: World, one: Client) -> None:
    """S-12 also where the node was there before, from the second of its creation on."""
    for number in range(FILES):
        one.local.write(f"f{number:02}", b"")
    world.later(10)
    before = one.calls("head")
    for number in range(FILES):
        one.local.stat(f"f{number:02}")
    assert one.calls("head") - before == FILES
    world.later(10)
    before = one.calls("head")
    for number in range(FILES):
        one.local.stat(f"f{number:02}")
    assert one.calls("head") == before


def test_a_directory_without_a_marker_is_not_looked_into_twice(world: World, one: Client) -> None:
    """S-03 the listing of the directory above, or its own, says that it is there."""
    for folder in range(4):
        world.put(f"d{folder}/f", b"")
    before = one.calls("list_page")
    one.local.scandir("", plus=True)
    assert one.calls("list_page") - before == 1
    world.later()
    one.local.listdir("")
    before = one.calls("head")
    for folder in range(4):
        one.local.listdir(f"d{folder}")
    heads = one.calls("head") - before
    for folder in range(4):
        one.local.stat(f"d{folder}")
    assert one.calls("head") - before == heads


def test_a_marker_that_is_known_is_not_asked_for_again(world: World, one: Client) -> None:
    """S-12 its version comes with the directory's own listing; another client's change is seen all the same."""
    one.local.mkdir("d")
    one.local.chmod("d", 0o700)
    world.later(10)
    one.local.stat("d")
    world.later(10)
    ino = one.local.stat("d").ino
    directory = one.fs.resolver.directory(ino)
    world.later(10)
    before = one.calls("head")
    one.fs.resolver.read_directory(directory)
    assert one.local.stat("d").mode & 0o777 == 0o700
    assert one.calls("head") == before
    world.client().local.chmod("d", 0o755)
    world.later(10)
    one.fs.resolver.read_directory(directory)
    assert one.local.stat("d").mode & 0o777 == 0o755


def test_where_a_link_leads_is_known_to_who_made_it(world: World, one: Client) -> None:
    """S-06 without a GET."""
    one.local.symlink(b"target", "x")
    assert one.local.readlink("x") == b"target"
    assert one.calls("get") == 0
    one.local.unlink("x")
    one.local.symlink(b"other", "x")
    assert one.local.readlink("x") == b"other"
