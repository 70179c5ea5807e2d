module github.com/cakefleet/cakefleet

go 1.26
