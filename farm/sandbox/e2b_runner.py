"""What runs commands inside an E2B sandbox: a short Perl program, called once per step, never held open.

E2B's gateway severs long streams, so a command is a *job*: started detached, it writes its end into a folder, and is
asked for by short calls. Every call can be repeated: starting a job that exists is asking for it, so a lost answer
costs nothing and runs nothing twice.

The job's supervisor is a subreaper: whatever the command starts stays below it, also what makes a session of its own,
and at the time-out, or when told to stop, all of it is stopped first and then killed. A command that ends by itself
leaves its background processes running, as a shell would.

The supervisor and the command have one user. A command that wants to can kill its supervisor or write a false end: that
spoils its own result only (grading happens in a fresh sandbox), and reads as a killed command, never as a lost sandbox.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Mapping
from dataclasses import dataclass

INLINE_BYTES = 64 << 10  # output up to here comes with the answer, the rest is fetched as a file
_ARGUMENT_BYTES = 24 << 10  # a longer job is written as a file first

# argv: verb, then  run BASE ID MS CAP WAIT JOB | poll BASE ID WAIT | stop BASE ID | get PATH MOST
# JOB: hex of packed fields (command, directory, then names and values of variables), or "-" when it lies in BASE/ID.job
RUNNER = r"""
use strict;
use warnings;
my ($verb, @given) = @ARGV;
my ($PRCTL, $SETSID) = (157, 112);    # x86_64, which E2B's machines are
my $INLINE = 65536;
$SIG{PIPE} = 'IGNORE';

sub now { open(my $file, '<', '/proc/uptime') or die; return (split(' ', <$file>))[0] }

sub nap { select(undef, undef, undef, $_[0]) }

sub slurp {
    my ($path) = @_;
    open(my $file, '<:raw', $path) or return undef;
    local $/;
    return scalar <$file>;
}

sub spill {    # whole or not at all
    my ($path, $data) = @_;
    open(my $file, '>:raw', "$path.new") or return 0;
    print {$file} $data;
    close($file) or return 0;
    return rename("$path.new", $path);
}

sub below {    # all descendants of this process
    my %children;
    opendir(my $proc, '/proc') or return ();
    for my $pid (grep { /^\d+$/ } readdir($proc)) {
        my $stat = slurp("/proc/$pid/stat");
        next if !defined $stat || $stat !~ /\) (\S) (\d+)/;
        push @{ $children{$2} }, [$pid, $1];
    }
    my (@found, @waiting) = ();
    @waiting = ($$);
    while (@waiting) {
        for my $child (@{ $children{ shift @waiting } || [] }) {
            push @waiting, $child->[0];
            push @found, $child->[0] if $child->[1] ne 'Z';
        }
    }
    return @found;
}

sub kill_all {
    my $until = now() + 3;
    my %stopped;
    while (now() < $until) {    # stopped first, so that nothing forks away meanwhile
        my @new = grep { !$stopped{$_} } below();
        last if !@new;
        kill('STOP', @new);
        @stopped{@new} = (1) x @new;
    }
    while (now() < $until) {
        my @left = below();
        kill('KILL', @left) if @left;
        1 while waitpid(-1, 1) > 0;
        last if !@left;
        nap(0.002);
    }
}

sub child {
    my ($write, $command, $cwd, %env) = @_;
    $SIG{PIPE} = $SIG{TERM} = $SIG{CHLD} = 'DEFAULT';
    open(STDOUT, '>&', $write);
    open(STDERR, '>&', $write);
    setpgrp(0, 0);
    if (!chdir($cwd)) { syswrite(STDERR, "cd: $cwd: $!\n"); exit(126) }
    $ENV{PWD} = $cwd;
    $ENV{$_} = $env{$_} for keys %env;
    no warnings 'exec';
    exec {'/bin/bash'} 'bash', '-c', $command or syswrite(STDERR, "bash: $!\n");
    exit(126);
}

sub supervise {
    my ($dir, $ms, $room, $command, $cwd, @env) = @_;
    syscall($SETSID);
    syscall($PRCTL, 36, 1, 0, 0, 0);    # PR_SET_CHILD_SUBREAPER
    my ($late, $out, $cut, $open) = (0, '', 0, 1);
    $SIG{TERM} = sub { $late = 1 };
    $SIG{CHLD} = sub { };                # so that it interrupts the wait
    pipe(my $read, my $write) or exit(1);
    my $pid = fork;
    child($write, $command, $cwd, @env) if defined $pid && $pid == 0;
    close($write);
    my ($deadline, $code) = (now() + $ms / 1000, 126);
    $out = "bash: fork: $!\n" if !defined $pid;
    my $take = sub {
        my $n = sysread($read, my $data, 65536);
        return $open = 0 if !$n;
        if ($n > $room) { $cut = 1; $data = substr($data, 0, $room) }
        $room -= length($data);
        $out .= $data;
        return 1;
    };
    my $ready = sub {
        my ($wait) = @_;
        my $bits = '';
        vec($bits, fileno($read), 1) = 1;
        return select($bits, undef, undef, $wait) > 0;
    };
    while (defined $pid) {
        my $left = $deadline - now();
        $late = 1 if $left <= 0;
        last if $late;
        my $done = waitpid($pid, 1);
        if ($done == $pid) { $code = $? & 127 ? 128 + ($? & 127) : $? >> 8; last }
        my $wait = $left < 0.02 ? $left : 0.02;
        if ($open) { $take->() if $ready->($wait) }
        else { nap($wait) }
    }
    if ($late) { kill_all(); $code = 124 }
    for (1 .. 64) { last if !$open || !$ready->(0) || !$take->() }
    1 while waitpid(-1, 1) > 0;
    my $cpu = 0;
    $cpu += $_ for times;
    spill("$dir/out", $out);
    spill("$dir/end", sprintf("%d %d %d %d %d", $code, $cut, $late, $cpu * 1e6, length($out)));
    exit(0);
}

sub report {
    my ($dir, $wait) = @_;
    my ($until, $pause) = (now() + $wait / 1000, 0.002);
    while (!-e "$dir/end") {
        waitpid(-1, 1);    # a supervisor that was killed is this process's own child when it was just started
        my $pid = slurp("$dir/pid");
        if (defined $pid && !-e "/proc/$pid") {
            nap(0.05);
            last if -e "$dir/end";
            print "DEAD\n";
            exit(0);
        }
        if (now() >= $until) { print "RUNNING\n"; exit(0) }
        nap($pause);
        $pause = $pause * 1.5 < 0.05 ? $pause * 1.5 : 0.05;
    }
    my $end = slurp("$dir/end");
    print "END $end\n";
    my ($size) = $end =~ /(\d+)$/;
    print pack('u', slurp("$dir/out")) if $size && $size <= $INLINE;
    exit(0);
}

if ($verb eq 'run') {
    my ($base, $id, $ms, $cap, $wait, $job) = @given;
    my $dir = "$base/$id";
    mkdir($base, 0700);
    if (mkdir($dir, 0700)) {
        for my $old (glob("$base/*")) {
            next if $old eq $dir || $old eq "$base/$id.job" || $old =~ /\.pl$/;
            -d $old ? do { unlink(glob("$old/*")); rmdir($old) } : unlink($old);
        }
        my $packed = $job eq '-' ? slurp("$base/$id.job") : pack('H*', $job);
        my $pid = fork;
        if (!defined $pid) { rmdir($dir); print "BUSY\n"; exit(0) }
        if ($pid == 0) {
            open(STDIN, '<', '/dev/null');
            open(STDOUT, '>', '/dev/null');
            open(STDERR, '>', '/dev/null');
            spill("$dir/pid", $$);
            supervise($dir, $ms, $cap, unpack('(N/a)*', $packed));
        }
    }
    elsif (!-d $dir) { print "FULL $!\n"; exit(0) }
    report($dir, $wait);
}
elsif ($verb eq 'poll') { report("$given[0]/$given[1]", $given[2]) }
elsif ($verb eq 'stop') {
    my $dir = "$given[0]/$given[1]";
    my $pid = slurp("$dir/pid");
    kill('TERM', $pid) if defined $pid && !-e "$dir/end";
    report($dir, -d $dir ? 4000 : 0);
}
elsif ($verb eq 'get') {
    my ($path, $most) = @given;
    if (!-f $path || !open(my $file, '<:raw', $path)) { print "MISSING\n" }
    elsif (-s $path > $most) { print "BIG\n" }
    elsif (-s $path > $INLINE) { print "FETCH\n" }
    else { print "DATA\n", pack('u', slurp($path)) }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A job's end. ``output`` is None when it has to be fetched; ``cpu_s`` is of the job alone."""

    exit_code: int
    truncated: bool
    timed_out: bool
    cpu_s: float
    output: bytes | None


def job(command: bytes, cwd: str, env: Mapping[str, str]) -> bytes:
    """What a job is made of, as the runner reads it."""
    fields = [command, cwd.encode(), *(text.encode() for item in env.items() for text in item)]
    return b"".join(struct.pack(">I", len(field)) + field for field in fields)


def inline(packed: bytes) -> str | None:
    """``packed`` as an argument; None when it is too long for one."""
    return packed.hex() if len(packed) <= _ARGUMENT_BYTES else None


def ended(answer: str) -> Ended | None:
    """The end that an answer tells of; None while the job runs. A job whose supervisor was killed ended with 137.

    Raises ``ValueError`` for anything else."""
    first, _, rest = answer.partition("\n")
    word, *numbers = first.split(" ")
    if word == "RUNNING":
        return None
    if word == "DEAD":
        said = b"the command was killed together with what watched over it\n"
        return Ended(exit_code=137, truncated=False, timed_out=False, cpu_s=0.0, output=said)
    if word in ("BUSY", "FULL"):
        said = b"bash: fork: retry: no room for another command: too many processes, or the disk is full\n"
        return Ended(exit_code=126, truncated=False, timed_out=False, cpu_s=0.0, output=said)
    if word != "END" or len(numbers) != 5:
        raise ValueError(answer[:200])
    code, cut, late, cpu_us, size = map(int, numbers)
    return Ended(
        exit_code=code,
        truncated=bool(cut),
        timed_out=bool(late),
        cpu_s=cpu_us / 1e6,
        output=uudecoded(rest) if size <= INLINE_BYTES else None,
    )


def uudecoded(text: str) -> bytes:
    return b"".join(binascii.a2b_uu(line) for line in text.splitlines() if line)
