module datastore.test/pause

go 1.21
