package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Registers of Intel's 8254x, and bits.
const (
	regTCTL  = 0x0400
	regPBA   = 0x1000
	regTDBAL = 0x3800
	regTDBAH = 0x3804
	regTDLEN = 0x3808
	regTDH   = 0x3810
	regTDT   = 0x3818

	pba = 0x30 // as Linux' driver leaves it

	tctlEnable = 1 << 1
	tctlPad    = 1 << 3

	txEndOfPacket = 1 << 0
	txInsertFCS   = 1 << 1
)

// ringSize is in descriptors; the device takes no fewer.
const ringSize = 8

// nic is a network card that is driven from user space. It only sends: what it
// sends costs the guest a dozen instructions a frame, so that a source of
// traffic hardly shows, and what it is sent costs nothing.
//
// The device is QEMU's: it copies the frame while the register is written, so
// that a buffer is free again at once.
type nic struct {
	regs    []byte
	swapped bool   // the registers are the other way round
	ring    []byte // ringSize descriptors of 16 bytes
	tail    uint32
}

// openNIC takes the device at a PCI address, such as 0000:00:0d.0, away from
// the kernel's driver. The ring goes to mem, which is at physical address phys.
func openNIC(address string, mem []byte, phys uint32) (*nic, error) {
	dir := filepath.Join("/sys/bus/pci/devices", address)
	err := os.WriteFile(filepath.Join(dir, "driver/unbind"), []byte(address), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("unbind %s: %w", address, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "enable"), []byte("1"), 0); err != nil {
		return nil, fmt.Errorf("enable %s: %w", address, err)
	}
	config, err := os.OpenFile(filepath.Join(dir, "config"), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer config.Close()
	// Command: memory space and bus master, little-endian.
	if _, err := config.WriteAt([]byte{6, 0}, 4); err != nil {
		return nil, fmt.Errorf("make %s bus master: %w", address, err)
	}
	bar, err := os.OpenFile(filepath.Join(dir, "resource0"), os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return nil, err
	}
	defer bar.Close()
	n := &nic{ring: mem[:ringSize*16]}
	if n.regs, err = unix.Mmap(int(bar.Fd()), 0, 0x20000, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map registers of %s: %w", address, err)
	}
	switch v := n.read(regPBA); {
	case v == pba:
	case swap32(v) == pba:
		n.swapped = true
	default:
		return nil, fmt.Errorf("%s does not look like an 8254x that Linux had: register PBA is %#x", address, v)
	}
	n.write(regTDBAL, phys)
	n.write(regTDBAH, 0)
	n.write(regTDLEN, ringSize*16)
	n.write(regTDH, 0)
	n.write(regTDT, 0)
	n.write(regTCTL, tctlEnable|tctlPad)
	return n, nil
}

// send sends the frame of n bytes at a physical address.
func (n *nic) send(phys uint32, length int) {
	d := n.ring[n.tail*16:]
	_ = d[15]
	// The device reads little-endian. Bytes 4-7 of the address stay 0.
	d[0], d[1], d[2], d[3] = byte(phys), byte(phys>>8), byte(phys>>16), byte(phys>>24)
	d[8], d[9] = byte(length), byte(length>>8)
	d[11], d[12] = txEndOfPacket|txInsertFCS, 0
	n.tail = (n.tail + 1) % ringSize
	n.write(regTDT, n.tail)
}

func (n *nic) reg(off uintptr) *uint32 { return (*uint32)(unsafe.Pointer(&n.regs[off])) }

func (n *nic) read(off uintptr) uint32 {
	v := *n.reg(off)
	if n.swapped {
		v = swap32(v)
	}
	return v
}

func (n *nic) write(off uintptr, v uint32) {
	if n.swapped {
		v = swap32(v)
	}
	*n.reg(off) = v
	runtime.KeepAlive(n)
}

func swap32(v uint32) uint32 {
	return v>>24 | v>>8&0xff00 | v<<8&0xff0000 | v<<24
}

// openMemory maps the machine's memory that Linux was told nothing about.
func openMemory(phys, size uint32) ([]byte, error) {
	fd, err := unix.Open("/dev/mem", unix.O_RDWR|unix.O_SYNC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/mem: %w", err)
	}
	defer unix.Close(fd)
	mem, err := unix.Mmap(fd, int64(phys), int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map memory at %#x: %w", phys, err)
	}
	return mem, nil
}
