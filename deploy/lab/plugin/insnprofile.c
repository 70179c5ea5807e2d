/* insnprofile: a plugin for QEMU 7.2 that tells where a whole machine spends
 * its instructions between two moments: when the instruction at address begin
 * is executed and when the one at end is. It writes one line a block to out:
 * address, instructions, executions, and the first four instruction words,
 * which tell programs apart that run at the same addresses.
 *
 *   -plugin insnprofile.so,begin=0x1234,end=0x5678,out=FILE
 *
 * The declarations restate what is needed of QEMU's plugin interface, version 1.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t plugin_id;
typedef struct qemu_info qemu_info;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { NO_REGS = 0, ADD_U64 = 0 };

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *ptr, uint64_t imm);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, void (*)(unsigned, void *), int flags, void *);

EXPORT int qemu_plugin_version = 1;

struct block {
    uint64_t address, executions;
    uint32_t insns, word[4];
    struct block *next;
};

enum { BUCKETS = 1 << 16 };
static struct block *blocks[BUCKETS];
static uint64_t begin_address, end_address;
static char *out_path;

static void on_begin(unsigned vcpu, void *data)
{
    (void)vcpu;
    (void)data;
    for (int i = 0; i < BUCKETS; i++)
        for (struct block *b = blocks[i]; b; b = b->next)
            b->executions = 0;
}

static void on_end(unsigned vcpu, void *data)
{
    (void)vcpu;
    (void)data;
    FILE *f = fopen(out_path, "w");
    if (!f) {
        perror(out_path);
        return;
    }
    for (int i = 0; i < BUCKETS; i++)
        for (struct block *b = blocks[i]; b; b = b->next)
            if (b->executions)
                fprintf(f, "%" PRIx64 " %" PRIu32 " %" PRIu64 " %08" PRIx32 " %08" PRIx32 " %08" PRIx32 " %08" PRIx32 "\n",
                        b->address, b->insns, b->executions, b->word[0], b->word[1], b->word[2], b->word[3]);
    fclose(f);
}

/* A block that is translated anew keeps its count. */
static struct block *find(const struct block *want)
{
    struct block **head = &blocks[(want->address >> 2 ^ want->word[0]) % BUCKETS];
    for (struct block *b = *head; b; b = b->next)
        if (b->address == want->address && b->insns == want->insns && !memcmp(b->word, want->word, sizeof b->word))
            return b;
    struct block *b = malloc(sizeof *b);
    *b = *want;
    b->next = *head;
    *head = b;
    return b;
}

static void on_translate(plugin_id id, struct qemu_plugin_tb *tb)
{
    (void)id;
    struct block want = { .address = (uint32_t)qemu_plugin_tb_vaddr(tb), .insns = qemu_plugin_tb_n_insns(tb) };
    for (uint32_t i = 0; i < want.insns; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        if (i < 4) {
            const uint8_t *d = qemu_plugin_insn_data(insn);
            want.word[i] = (uint32_t)d[0] << 24 | d[1] << 16 | d[2] << 8 | d[3];
        }
        uint64_t a = (uint32_t)qemu_plugin_insn_vaddr(insn);
        if (a == begin_address)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_begin, NO_REGS, NULL);
        if (a == end_address)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_end, NO_REGS, NULL);
    }
    qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD_U64, &find(&want)->executions, 1);
}

EXPORT int qemu_plugin_install(plugin_id id, const qemu_info *info, int argc, char **argv)
{
    (void)info;
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "begin=", 6))
            begin_address = strtoull(argv[i] + 6, NULL, 0);
        else if (!strncmp(argv[i], "end=", 4))
            end_address = strtoull(argv[i] + 4, NULL, 0);
        else if (!strncmp(argv[i], "out=", 4))
            out_path = strdup(argv[i] + 4);
    }
    if (!begin_address || !end_address || !out_path) {
        fprintf(stderr, "insnprofile: begin=, end= and out= are needed\n");
        return -1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
    return 0;
}
