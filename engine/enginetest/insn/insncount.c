//go:build ignore

/*
 * insncount counts what a program executes between two marks, as a plugin of
 * qemu-user 7.2 (plugin interface version 1):
 *
 *	qemu-mips -plugin insncount.so,out=FILE PROGRAM ...
 *
 * The program marks with prctl(MARK, 1) where counting starts and with
 * prctl(MARK, 0) where it ends; only the thread that asked for the start is
 * counted, so a runtime's other threads do not disturb the figures. At exit,
 * FILE gets one line "PC INSTRUCTIONS EXECUTIONS" for each translated block that
 * was executed, in hexadecimal.
 *
 * Debian has no package with the header of this interface, so the part of it
 * that is used is declared here.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t plugin_id;
struct plugin_info {
	const char *target;
	struct { int min, cur; } version;
	bool system_emulation;
};
struct tb;
typedef void syscall_cb(plugin_id, unsigned vcpu, int64_t nr, uint64_t a1, uint64_t a2, uint64_t a3,
			uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8);

size_t qemu_plugin_tb_n_insns(const struct tb *);
uint64_t qemu_plugin_tb_vaddr(const struct tb *);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct tb *, void (*)(unsigned, void *), int flags, void *);
void qemu_plugin_register_vcpu_syscall_cb(plugin_id, syscall_cb *);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);

EXPORT int qemu_plugin_version = 1;

enum { MARK = 0x63616b65 };

struct block {
	uint64_t pc, insns, execs;
	struct block *next;
};

static struct block *blocks; /* translation is serialised by qemu */
static int64_t counted = -1; /* the virtual CPU (thread) that is being counted */
static FILE *out;

static void executed(unsigned vcpu, void *block)
{
	if (vcpu == __atomic_load_n(&counted, __ATOMIC_RELAXED))
		((struct block *)block)->execs++;
}

static void translated(plugin_id id, struct tb *tb)
{
	struct block *b = calloc(1, sizeof *b);

	(void)id;
	if (!b)
		abort();
	b->pc = qemu_plugin_tb_vaddr(tb);
	b->insns = qemu_plugin_tb_n_insns(tb);
	b->next = __atomic_load_n(&blocks, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(&blocks, &b->next, b, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
	qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, 0, b);
}

static void on_syscall(plugin_id id, unsigned vcpu, int64_t nr, uint64_t a1, uint64_t a2, uint64_t a3,
		       uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8)
{
	(void)id, (void)nr, (void)a3, (void)a4, (void)a5, (void)a6, (void)a7, (void)a8;
	if ((uint32_t)a1 == MARK)
		__atomic_store_n(&counted, a2 ? (int64_t)vcpu : -1, __ATOMIC_RELAXED);
}

static void at_exit(plugin_id id, void *unused)
{
	(void)id, (void)unused;
	for (struct block *b = blocks; b; b = b->next)
		if (b->execs)
			fprintf(out, "%" PRIx64 " %" PRIx64 " %" PRIx64 "\n", b->pc, b->insns, b->execs);
	fclose(out);
}

EXPORT int qemu_plugin_install(plugin_id id, const struct plugin_info *info, int argc, char **argv)
{
	if (info->system_emulation || argc != 1 || strncmp(argv[0], "out=", 4)) {
		fprintf(stderr, "insncount: usage: -plugin insncount.so,out=FILE, user emulation only\n");
		return -1;
	}
	out = fopen(argv[0] + 4, "w");
	if (!out) {
		perror(argv[0] + 4);
		return -1;
	}
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_vcpu_syscall_cb(id, on_syscall);
	qemu_plugin_register_atexit_cb(id, at_exit, NULL);
	return 0;
}
