// Package api has the gRPC services of the controller, one type and one file
// for each. A service maps messages to native words and errors to codes, and
// leaves the rest to the packages it serves.
package api
