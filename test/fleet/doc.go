// Package fleet plays a whole fleet under faults and judges what happened:
// three controllers on three members of etcd, each a process of its own, and
// simulated agents with real sessions, while plans keep changing. Processes are
// killed, stopped for longer than a lease, and cut off the network; then
// everything is healed, and model judges the history.
//
//	go test ./test/fleet                      the usual run, with a new seed
//	go test ./test/fleet -seed 7              the faults of seed 7 again
//	go test ./test/fleet -rounds 50           faults for many minutes
//
// A seed repeats which faults come, in what order, on whom and for how long;
// what the processes make of them is theirs.
//
// Cutting off needs network namespaces, and so root; without, that part is left
// out and said so. What agents find out by keepalive and what a load balancer
// would tell them is played by the harness: an agent whose controller has
// failed loses its connection after a while and dials another one.
//
// The judge is judged too: model_test.go breaks each rule, and
// TestPlantedBugs plants faults in agents and between controller and etcd:
//
//	drop one answer             go test ./test/fleet -run PlantedBugs/answer
//	apply an old state          go test ./test/fleet -run PlantedBugs/stale
//	lose one event of a watch   go test ./test/fleet -run PlantedBugs/event
//	a leader without a fence    go test ./test/fleet -run PlantedBugs/fence
package fleet
