// A server that speaks Pub/Sub, for the tests where Google's emulator is not installed: pubsub_fake HOST:PORT
package main

import (
	"log"
	"net"
	"os"
	"strconv"

	"cloud.google.com/go/pubsub/v2/pstest"
)

func main() {
	host, text, err := net.SplitHostPort(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	port, err := strconv.Atoi(text)
	if err != nil {
		log.Fatal(err)
	}
	server := pstest.NewServerWithAddress(net.JoinHostPort(host, strconv.Itoa(port)))
	defer server.Close()
	select {}
}
