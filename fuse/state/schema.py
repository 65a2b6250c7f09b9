"""The tables of the state database."""

from __future__ import annotations

SCHEMA = """
-- A file whose bytes are not all in the store. One row per staging file.
create table if not exists unsent(
  staging text primary key,        -- name of the file in staging/
  key text not null,               -- where it is to be written; follows renames
  base_key text not null,          -- the object its unchanged ranges come from, '' when it needs none
  base_etag text not null,         -- that object's version
  base_length integer not null,    -- that object's size
  base_size integer not null,      -- bytes of it that are still part of the file
  metadata text not null,          -- JSON of the user metadata to write
  content_type text not null,
  since_ns integer not null,       -- when it was first changed
  error text not null default '',  -- why the last upload failed, one line
  expects text,                    -- the version to replace, '' for none at all; null: whatever is there
  stuck integer not null default 0, -- sending it again is no use: a person saves or discards it
  unsynced integer not null default 0 -- the machine went down before the file was sure to be on the disk
);
-- The kernel's start that this database was last used in; one row.
create table if not exists boots(id text not null);
create table if not exists readers(id text not null); -- whose credentials the attributes were told, one row
-- A multipart upload that is neither completed nor aborted. upload_id '': no answer came, it may exist.
create table if not exists uploads(
  id integer primary key autoincrement, key text not null, upload_id text not null default '',
  since_ns integer not null);      -- our clock before it was begun
-- Something begun that must be finished: 'rename-file', 'rename-directory', 'discard', or 'remove' (the second half of
-- a 'rename-file': target is the version of the source then).
create table if not exists intents(
  id integer primary key autoincrement, kind text not null, source text not null, target text not null);
-- Where a rename puts its node; see nodelog.NodeRecord.
create table if not exists moves(
  intent integer primary key, ino integer not null, parent integer not null, kind integer not null,
  tail text not null, name blob not null);
-- What an intent is about: that version of the source ('' unknown), or what was there before it was put off (when, by
-- our clock; 0: never).
create table if not exists subjects(
  intent integer primary key, etag text not null default '', put_off_ns integer not null default 0,
  replaced text not null default '', replaced_etag text not null default '', -- an object that goes in the end, or ''
  began_ns integer not null default 0, -- by the store's clock: what is older was there when it was begun; 0 unknown
  over text);                      -- the version of the target then, '' for none; null: unknown
-- User metadata of an object, by version; mtime_s is its Last-Modified.
create table if not exists attributes(
  key text primary key, etag text not null, mtime_s integer not null, metadata text not null, content_type text not null
) without rowid;
"""
