"""Where a server does not keep the contract, and why that is known: one visible table.

Each row is a strict expected failure of a test (server, test, the key or max_keys it is given, or '' for any): when
the server changes its mind, the test fails and the row must go. REFUSED lists names that a server does not take; the
test then asks for InvalidKey.
"""

from __future__ import annotations

_MOTO_COPY = "moto ignores x-amz-copy-source-if-match"
_VGW_RAW = "versitygw ignores encoding-type=url and shows the bytes XML can't carry as U+FFFD"
_VGW_PATH = "versitygw keeps keys as paths of a disk, which the listing shows without empty and dot segments"

DEVIATIONS: dict[tuple[str, str, str], str] = {
    ("moto", "test_a_copy_of_another_version_is_refused", ""): _MOTO_COPY,
    ("moto", "test_a_part_copy_of_another_version_is_refused", ""): _MOTO_COPY,
    ("moto", "test_complete_replaces_only_the_named_version", ""): "moto ignores If-Match of a completion",
    ("moto", "test_an_aborted_upload_is_gone", ""): "moto answers 500",
    ("moto", "test_a_part_of_an_unknown_upload_is_not_found", ""): "moto answers 500",
    ("moto", "test_an_odd_key_reads_back", "new\nline"): "moto does not route a line feed in a path",
    ("moto", "test_an_odd_key_is_listed_exactly", "new\nline"): "moto does not route a line feed in a path",
    ("moto", "test_an_odd_key_is_listed_exactly", "bad\udcffbyte"): "moto keeps the byte as %FF",
    ("moto", "test_bulk_delete_takes_odd_keys", ""): "moto does not route a line feed in a path",
    ("versitygw", "test_an_odd_key_is_listed_exactly", "control\x01byte"): _VGW_RAW,
    ("versitygw", "test_an_odd_key_is_listed_exactly", "bad\udcffbyte"): _VGW_RAW,
    ("versitygw", "test_an_odd_key_is_listed_exactly", "a//b"): _VGW_PATH,
    ("versitygw", "test_an_odd_key_is_listed_exactly", "/leading"): _VGW_PATH,
    ("versitygw", "test_an_odd_key_is_listed_exactly", "a/./b"): _VGW_PATH,
    ("versitygw", "test_an_odd_key_is_listed_exactly", "a/../b"): _VGW_PATH,
    ("minio", "test_a_file_and_the_directory_beside_it_are_both_listed", ""): (
        "MinIO keeps both, but no listing shows what is below the file"
    ),
    ("minio", "test_pages_with_a_delimiter_lose_and_double_nothing", "1"): (
        "MinIO ends a listing of pages of one key after the directory's own marker"
    ),
    ("minio", "test_an_odd_key_is_listed_exactly", "/leading"): "MinIO drops a leading slash from its listing",
}

REFUSED: dict[tuple[str, str], str] = {
    ("versitygw", "."): "a path of a disk can't end in a dot segment",
    ("minio", "."): "MinIO refuses dot segments",
    ("minio", "a/./b"): "MinIO refuses dot segments",
    ("minio", "a/../b"): "MinIO refuses dot segments",
    ("minio", "a//b"): "MinIO refuses empty segments",
    ("minio", "bad\udcffbyte"): "MinIO takes UTF-8 only (it says SignatureDoesNotMatch)",
}
