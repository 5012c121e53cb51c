; clang 19, sha256 of the C d64837170f3c126d
; scripts/compile_kernels.py has made this file.

%struct.run = type { i64, i64, i64 }
%struct.row = type <{ [4 x i64], i32 }>
%struct.index = type { ptr, ptr, ptr, ptr, i64 }
%struct.grant = type { i64, i64, i64, double }

define i64 @examine(ptr %slots, ptr %table, ptr %indexes, i64 %num_indexes, ptr %rows, ptr %runs, i64 %num_runs, i64 %seed, i64 %picks, ptr %batch) {
entry:
  %add.ptr = getelementptr %struct.run, ptr %runs, i64 %num_runs
  %cmp.not176 = icmp sgt i64 %num_runs, 0
  br i1 %cmp.not176, label %for.body.lr.ph, label %for.end18.thread

for.body.lr.ph:
  %tobool.not = icmp eq i64 %picks, 0
  %new = getelementptr i8, ptr %slots, i64 120
  %sample = getelementptr i8, ptr %slots, i64 160
  %used_again = getelementptr i8, ptr %slots, i64 128
  %worth = getelementptr i8, ptr %slots, i64 168
  %prompts = getelementptr i8, ptr %batch, i64 8
  %tenants = getelementptr i8, ptr %batch, i64 16
  br label %for.body

for.body:
  %count.0178 = phi i64 [ 0, %for.body.lr.ph ], [ %count.1.lcssa, %for.inc15 ]
  %run.0177 = phi ptr [ %runs, %for.body.lr.ph ], [ %incdec.ptr, %for.inc15 ]
  %prompt = getelementptr i8, ptr %run.0177, i64 8
  %0 = load i64, ptr %prompt, align 8
  %rem = srem i64 %0, 17
  br i1 %tobool.not, label %if.end, label %land.lhs.true

land.lhs.true:
  %1 = load ptr, ptr %new, align 8
  %arrayidx = getelementptr double, ptr %1, i64 %rem
  %2 = load double, ptr %arrayidx, align 8
  %3 = load double, ptr %sample, align 8
  %cmp1 = fcmp ult double %2, %3
  br i1 %cmp1, label %if.end, label %land.lhs.true2

land.lhs.true2:
  %4 = load ptr, ptr %used_again, align 8
  %arrayidx3 = getelementptr double, ptr %4, i64 %rem
  %5 = load double, ptr %arrayidx3, align 8
  %6 = load double, ptr %worth, align 8
  %mul = fmul double %5, %6
  %cmp6 = fcmp olt double %mul, %2
  br i1 %cmp6, label %cleanup68, label %if.end

if.end:
  %7 = load i64, ptr %run.0177, align 8
  %add = add i64 %7, %count.0178
  %cmp9174 = icmp sgt i64 %7, 0
  br i1 %cmp9174, label %for.body11.lr.ph, label %for.inc15

for.body11.lr.ph:
  %tenant = getelementptr i8, ptr %run.0177, i64 16
  br label %for.body11

for.body11:
  %count.1175 = phi i64 [ %count.0178, %for.body11.lr.ph ], [ %inc, %for.body11 ]
  %8 = load i64, ptr %prompt, align 8
  %9 = load ptr, ptr %prompts, align 8
  %arrayidx13 = getelementptr i64, ptr %9, i64 %count.1175
  store i64 %8, ptr %arrayidx13, align 8
  %10 = load i64, ptr %tenant, align 8
  %11 = load ptr, ptr %tenants, align 8
  %arrayidx14 = getelementptr i64, ptr %11, i64 %count.1175
  store i64 %10, ptr %arrayidx14, align 8
  %inc = add i64 %count.1175, 1
  %cmp9 = icmp slt i64 %inc, %add
  br i1 %cmp9, label %for.body11, label %for.inc15

for.inc15:
  %count.1.lcssa = phi i64 [ %count.0178, %if.end ], [ %inc, %for.body11 ]
  %incdec.ptr = getelementptr i8, ptr %run.0177, i64 24
  %cmp.not = icmp ult ptr %incdec.ptr, %add.ptr
  br i1 %cmp.not, label %for.body, label %for.end18

for.end18:
  %last_word = getelementptr i8, ptr %rows, i64 32
  %12 = load i32, ptr %last_word, align 1
  %cmp19 = icmp ult i32 %12, 134217728
  br i1 %cmp19, label %cleanup68, label %lor.lhs.false

for.end18.thread:
  %last_word197 = getelementptr i8, ptr %rows, i64 32
  %13 = load i32, ptr %last_word197, align 1
  %cmp19198 = icmp ult i32 %13, 134217728
  br i1 %cmp19198, label %cleanup68, label %lor.lhs.false.thread

lor.lhs.false.thread:
  %bits.i201 = getelementptr i8, ptr %batch, i64 32
  %14 = load i64, ptr %bits.i201, align 8
  %notmask.i202 = shl i64 -1, %14
  br label %for.cond22.preheader.i

lor.lhs.false:
  %bits.i = getelementptr i8, ptr %batch, i64 32
  %15 = load i64, ptr %bits.i, align 8
  %notmask.i = shl i64 -1, %15
  %sub.i = xor i64 %notmask.i, -1
  %cmp61.i = icmp sgt i64 %count.1.lcssa, 0
  br i1 %cmp61.i, label %for.body.lr.ph.i, label %for.cond22.preheader.i

for.body.lr.ph.i:
  %places.i = getelementptr i8, ptr %batch, i64 24
  br label %for.body.i

for.cond22.preheader.i:
  %notmask.i206 = phi i64 [ %notmask.i, %lor.lhs.false ], [ %notmask.i, %while.end.thread.i ], [ %notmask.i202, %lor.lhs.false.thread ], [ %notmask.i, %while.end.i ]
  %count.0.lcssa199205 = phi i64 [ %count.1.lcssa, %lor.lhs.false ], [ %count.1.lcssa, %while.end.thread.i ], [ 0, %lor.lhs.false.thread ], [ %count.1.lcssa, %while.end.i ]
  %16 = phi i32 [ %12, %lor.lhs.false ], [ %12, %while.end.thread.i ], [ %13, %lor.lhs.false.thread ], [ %12, %while.end.i ]
  %tobool20.not = phi i1 [ false, %lor.lhs.false ], [ true, %while.end.thread.i ], [ false, %lor.lhs.false.thread ], [ false, %while.end.i ]
  %places27.i = getelementptr i8, ptr %batch, i64 24
  %17 = sub i64 0, %notmask.i206
  %xtraiter = and i64 %17, 3
  %18 = icmp ugt i64 %notmask.i206, -4
  br i1 %18, label %all_differ.exit.unr-lcssa, label %for.cond22.preheader.i.new

for.cond22.preheader.i.new:
  %unroll_iter = and i64 %17, -4
  br label %for.body26.i

for.body.i:
  %i.062.i = phi i64 [ 0, %for.body.lr.ph.i ], [ %add17.i, %while.end.i ]
  %arrayidx.i = getelementptr %struct.row, ptr %rows, i64 %i.062.i
  %19 = load i64, ptr %arrayidx.i, align 1
  %mul.i = mul i64 %19, -7046029254386353131
  %20 = load i64, ptr %bits.i, align 8
  %sub3.i = sub i64 64, %20
  %shr.i = lshr i64 %mul.i, %sub3.i
  %21 = load ptr, ptr %places.i, align 8
  %arrayidx452.i = getelementptr i32, ptr %21, i64 %shr.i
  %22 = load i32, ptr %arrayidx452.i, align 4
  %tobool5.not53.i = icmp eq i32 %22, 0
  br i1 %tobool5.not53.i, label %while.end.i, label %land.rhs6.lr.ph.i

land.rhs6.lr.ph.i:
  %last_word1.i.i = getelementptr i8, ptr %arrayidx.i, i64 32
  %23 = load i32, ptr %last_word1.i.i, align 1
  %arrayidx5.1.i.i = getelementptr i8, ptr %arrayidx.i, i64 8
  %24 = load i64, ptr %arrayidx5.1.i.i, align 1
  %arrayidx5.2.i.i = getelementptr i8, ptr %arrayidx.i, i64 16
  %25 = load i64, ptr %arrayidx5.2.i.i, align 1
  %arrayidx5.3.i.i = getelementptr i8, ptr %arrayidx.i, i64 24
  %26 = load i64, ptr %arrayidx5.3.i.i, align 1
  br label %land.rhs6.i

land.rhs6.i:
  %27 = phi i32 [ %22, %land.rhs6.lr.ph.i ], [ %36, %while.body.i ]
  %place.054.i = phi i64 [ %shr.i, %land.rhs6.lr.ph.i ], [ %and.i, %while.body.i ]
  %28 = sext i32 %27 to i64
  %29 = getelementptr %struct.row, ptr %rows, i64 %28
  %arrayidx10.i = getelementptr i8, ptr %29, i64 -36
  %last_word.i.i = getelementptr i8, ptr %29, i64 -4
  %30 = load i32, ptr %last_word.i.i, align 1
  %xor.i.i = xor i32 %30, %23
  %conv.i.i = zext i32 %xor.i.i to i64
  %31 = load i64, ptr %arrayidx10.i, align 1
  %xor6.i.i = xor i64 %31, %19
  %or.i.i = or i64 %xor6.i.i, %conv.i.i
  %arrayidx.1.i.i = getelementptr i8, ptr %29, i64 -28
  %32 = load i64, ptr %arrayidx.1.i.i, align 1
  %xor6.1.i.i = xor i64 %32, %24
  %or.1.i.i = or i64 %or.i.i, %xor6.1.i.i
  %arrayidx.2.i.i = getelementptr i8, ptr %29, i64 -20
  %33 = load i64, ptr %arrayidx.2.i.i, align 1
  %xor6.2.i.i = xor i64 %33, %25
  %or.2.i.i = or i64 %or.1.i.i, %xor6.2.i.i
  %arrayidx.3.i.i = getelementptr i8, ptr %29, i64 -12
  %34 = load i64, ptr %arrayidx.3.i.i, align 1
  %xor6.3.i.i = xor i64 %34, %26
  %or.3.i.i = or i64 %or.2.i.i, %xor6.3.i.i
  %cmp7.i.not.not.i = icmp eq i64 %or.3.i.i, 0
  br i1 %cmp7.i.not.not.i, label %while.end.thread.i, label %while.body.i

while.end.thread.i:
  %arrayidx4.le67.i = getelementptr i32, ptr %21, i64 %place.054.i
  %35 = trunc i64 %i.062.i to i32
  %conv1869.i = add i32 %35, 1
  store i32 %conv1869.i, ptr %arrayidx4.le67.i, align 4
  br label %for.cond22.preheader.i

while.body.i:
  %add.i = add i64 %place.054.i, 1
  %and.i = and i64 %add.i, %sub.i
  %arrayidx4.i = getelementptr i32, ptr %21, i64 %and.i
  %36 = load i32, ptr %arrayidx4.i, align 4
  %tobool5.not.i = icmp eq i32 %36, 0
  br i1 %tobool5.not.i, label %while.end.i, label %land.rhs6.i

while.end.i:
  %place.0.lcssa.i = phi i64 [ %shr.i, %for.body.i ], [ %and.i, %while.body.i ]
  %arrayidx4.le.i = getelementptr i32, ptr %21, i64 %place.0.lcssa.i
  %add17.i = add i64 %i.062.i, 1
  %conv18.i = trunc i64 %add17.i to i32
  store i32 %conv18.i, ptr %arrayidx4.le.i, align 4
  %exitcond.not = icmp eq i64 %add17.i, %count.1.lcssa
  br i1 %exitcond.not, label %for.cond22.preheader.i, label %for.body.i

for.body26.i:
  %place21.064.i = phi i64 [ 0, %for.cond22.preheader.i.new ], [ %inc30.i.3, %for.body26.i ]
  %niter = phi i64 [ 0, %for.cond22.preheader.i.new ], [ %niter.next.3, %for.body26.i ]
  %37 = load ptr, ptr %places27.i, align 8
  %arrayidx28.i = getelementptr i32, ptr %37, i64 %place21.064.i
  store i32 0, ptr %arrayidx28.i, align 4
  %inc30.i = or i64 %place21.064.i, 1
  %38 = load ptr, ptr %places27.i, align 8
  %arrayidx28.i.1 = getelementptr i32, ptr %38, i64 %inc30.i
  store i32 0, ptr %arrayidx28.i.1, align 4
  %inc30.i.1 = or i64 %place21.064.i, 2
  %39 = load ptr, ptr %places27.i, align 8
  %arrayidx28.i.2 = getelementptr i32, ptr %39, i64 %inc30.i.1
  store i32 0, ptr %arrayidx28.i.2, align 4
  %inc30.i.2 = or i64 %place21.064.i, 3
  %40 = load ptr, ptr %places27.i, align 8
  %arrayidx28.i.3 = getelementptr i32, ptr %40, i64 %inc30.i.2
  store i32 0, ptr %arrayidx28.i.3, align 4
  %inc30.i.3 = add i64 %place21.064.i, 4
  %niter.next.3 = add i64 %niter, 4
  %niter.ncmp.3 = icmp eq i64 %niter.next.3, %unroll_iter
  br i1 %niter.ncmp.3, label %all_differ.exit.unr-lcssa, label %for.body26.i

all_differ.exit.unr-lcssa:
  %place21.064.i.unr = phi i64 [ 0, %for.cond22.preheader.i ], [ %inc30.i.3, %for.body26.i ]
  %lcmp.mod.not = icmp eq i64 %xtraiter, 0
  br i1 %lcmp.mod.not, label %all_differ.exit, label %for.body26.i.epil

for.body26.i.epil:
  %place21.064.i.epil = phi i64 [ %inc30.i.epil, %for.body26.i.epil ], [ %place21.064.i.unr, %all_differ.exit.unr-lcssa ]
  %epil.iter = phi i64 [ %epil.iter.next, %for.body26.i.epil ], [ 0, %all_differ.exit.unr-lcssa ]
  %41 = load ptr, ptr %places27.i, align 8
  %arrayidx28.i.epil = getelementptr i32, ptr %41, i64 %place21.064.i.epil
  store i32 0, ptr %arrayidx28.i.epil, align 4
  %inc30.i.epil = add i64 %place21.064.i.epil, 1
  %epil.iter.next = add i64 %epil.iter, 1
  %epil.iter.cmp.not = icmp eq i64 %epil.iter.next, %xtraiter
  br i1 %epil.iter.cmp.not, label %all_differ.exit, label %for.body26.i.epil

all_differ.exit:
  br i1 %tobool20.not, label %cleanup68, label %for.cond23.preheader

for.cond23.preheader:
  %cmp24.not182 = icmp slt i64 %count.0.lcssa199205, 1
  br i1 %cmp24.not182, label %cleanup64, label %for.body26.lr.ph

for.body26.lr.ph:
  %num_buckets.i = getelementptr i8, ptr %table, i64 40
  %first.i = getelementptr i8, ptr %table, i64 32
  %alive.i = getelementptr i8, ptr %table, i64 8
  %next.i = getelementptr i8, ptr %table, i64 16
  %cmp43.not180 = icmp sgt i64 %num_indexes, 0
  br label %for.body26

for.body26:
  %cmp24.not184 = phi i1 [ false, %for.body26.lr.ph ], [ %cmp24.not, %for.inc62 ]
  %i.0183 = phi i64 [ 0, %for.body26.lr.ph ], [ %inc63, %for.inc62 ]
  %arrayidx27 = getelementptr %struct.row, ptr %rows, i64 %i.0183
  %word.0.copyload.i = load i64, ptr %arrayidx27, align 1
  %xor.i = xor i64 %word.0.copyload.i, %seed
  %mul.i115 = mul i64 %xor.i, -2960836687051489901
  %shr.i116 = lshr i64 %mul.i115, 32
  %xor1.i = xor i64 %shr.i116, %mul.i115
  %mul2.i = mul i64 %xor1.i, -2960836687051489901
  %tobool.not.i = icmp eq i64 %word.0.copyload.i, %seed
  %cond.i = select i1 %tobool.not.i, i64 1, i64 %mul2.i
  %42 = load ptr, ptr %batch, align 8
  %arrayidx29 = getelementptr i64, ptr %42, i64 %i.0183
  store i64 %cond.i, ptr %arrayidx29, align 8
  %last_word31 = getelementptr i8, ptr %arrayidx27, i64 32
  %43 = load i32, ptr %last_word31, align 1
  %cmp33.not.unshifted = xor i32 %43, %16
  %cmp33.not = icmp ult i32 %cmp33.not.unshifted, 16777216
  br i1 %cmp33.not, label %lor.lhs.false34, label %cleanup64

lor.lhs.false34:
  %conv.i = zext i32 %43 to i64
  %hash.09.i = mul i64 %conv.i, -7046029254386353131
  %arrayidx.i117 = getelementptr i8, ptr %arrayidx27, i64 24
  %44 = load i64, ptr %arrayidx.i117, align 1
  %or.i.i118 = tail call i64 @llvm.fshl.i64(i64 %hash.09.i, i64 %hash.09.i, i64 29)
  %xor.i.i119 = xor i64 %44, %or.i.i118
  %hash.0.i = mul i64 %xor.i.i119, -7046029254386353131
  %arrayidx.1.i = getelementptr i8, ptr %arrayidx27, i64 16
  %45 = load i64, ptr %arrayidx.1.i, align 1
  %or.i.1.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.i, i64 %hash.0.i, i64 29)
  %xor.i.1.i = xor i64 %or.i.1.i, %45
  %hash.0.1.i = mul i64 %xor.i.1.i, -7046029254386353131
  %arrayidx.2.i = getelementptr i8, ptr %arrayidx27, i64 8
  %46 = load i64, ptr %arrayidx.2.i, align 1
  %or.i.2.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.1.i, i64 %hash.0.1.i, i64 29)
  %xor.i.2.i = xor i64 %or.i.2.i, %46
  %hash.0.2.i = mul i64 %xor.i.2.i, -7046029254386353131
  %47 = load i64, ptr %arrayidx27, align 1
  %or.i.3.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.2.i, i64 %hash.0.2.i, i64 29)
  %xor.i.3.i = xor i64 %or.i.3.i, %47
  %hash.0.3.i = mul i64 %xor.i.3.i, -7046029254386353131
  %shr.i120 = lshr i64 %hash.0.3.i, 32
  %48 = load i64, ptr %num_buckets.i, align 8
  %mul.i121 = mul i64 %shr.i120, %48
  %shr3.i = lshr i64 %mul.i121, 32
  %49 = load ptr, ptr %first.i, align 8
  %arrayidx.i122 = getelementptr i32, ptr %49, i64 %shr3.i
  %entry1.017.i = load i32, ptr %arrayidx.i122, align 4
  %cmp18.i = icmp sgt i32 %entry1.017.i, -1
  br i1 %cmp18.i, label %land.rhs.lr.ph.i, label %entry_of.exit

land.rhs.lr.ph.i:
  %50 = load ptr, ptr %table, align 8
  br label %land.rhs.i

land.rhs.i:
  %entry1.019.i = phi i32 [ %entry1.017.i, %land.rhs.lr.ph.i ], [ %entry1.0.i, %while.body.i142 ]
  %idxprom.i = zext i32 %entry1.019.i to i64
  %arrayidx2.i = getelementptr %struct.row, ptr %50, i64 %idxprom.i
  %last_word.i.i128 = getelementptr i8, ptr %arrayidx2.i, i64 32
  %51 = load i32, ptr %last_word.i.i128, align 1
  %xor.i.i129 = xor i32 %51, %43
  %conv.i.i130 = zext i32 %xor.i.i129 to i64
  %52 = load i64, ptr %arrayidx2.i, align 1
  %xor6.i.i131 = xor i64 %52, %47
  %or.i.i132 = or i64 %xor6.i.i131, %conv.i.i130
  %arrayidx.1.i.i133 = getelementptr i8, ptr %arrayidx2.i, i64 8
  %53 = load i64, ptr %arrayidx.1.i.i133, align 1
  %xor6.1.i.i134 = xor i64 %53, %46
  %or.1.i.i135 = or i64 %or.i.i132, %xor6.1.i.i134
  %arrayidx.2.i.i136 = getelementptr i8, ptr %arrayidx2.i, i64 16
  %54 = load i64, ptr %arrayidx.2.i.i136, align 1
  %xor6.2.i.i137 = xor i64 %54, %45
  %or.2.i.i138 = or i64 %or.1.i.i135, %xor6.2.i.i137
  %arrayidx.3.i.i139 = getelementptr i8, ptr %arrayidx2.i, i64 24
  %55 = load i64, ptr %arrayidx.3.i.i139, align 1
  %xor6.3.i.i140 = xor i64 %55, %44
  %or.3.i.i141 = or i64 %or.2.i.i138, %xor6.3.i.i140
  %cmp7.i.not.i = icmp eq i64 %or.3.i.i141, 0
  br i1 %cmp7.i.not.i, label %land.rhs3.i, label %while.body.i142

land.rhs3.i:
  %56 = load ptr, ptr %alive.i, align 8
  %arrayidx5.i = getelementptr i8, ptr %56, i64 %idxprom.i
  %57 = load i8, ptr %arrayidx5.i, align 1
  %tobool6.not.i = icmp eq i8 %57, 0
  br i1 %tobool6.not.i, label %while.body.i142, label %cleanup64

while.body.i142:
  %58 = load ptr, ptr %next.i, align 8
  %arrayidx9.i = getelementptr i32, ptr %58, i64 %idxprom.i
  %entry1.0.i = load i32, ptr %arrayidx9.i, align 4
  %cmp.i143 = icmp sgt i32 %entry1.0.i, -1
  br i1 %cmp.i143, label %land.rhs.i, label %entry_of.exit

entry_of.exit:
  br i1 %cmp43.not180, label %for.body45.lr.ph, label %for.inc62

for.body45.lr.ph:
  %59 = load ptr, ptr %batch, align 8
  %arrayidx48 = getelementptr i64, ptr %59, i64 %i.0183
  %60 = load i64, ptr %arrayidx48, align 8
  %shr.i144 = lshr i64 %60, 32
  %and.i146 = and i64 %60, 127
  %61 = mul i64 %and.i146, 72340172838076673
  %mul2.i148 = add i64 %61, -9187201950435737472
  br label %for.body45

for.body45:
  %owner.0181 = phi i64 [ 0, %for.body45.lr.ph ], [ %inc54, %for.inc53 ]
  %arrayidx46 = getelementptr %struct.index, ptr %indexes, i64 %owner.0181
  %num_slots.i = getelementptr i8, ptr %arrayidx46, i64 32
  %62 = load i64, ptr %num_slots.i, align 8
  %mul.i145 = mul i64 %62, %shr.i144
  %shr1.i = lshr i64 %mul.i145, 32
  %63 = load ptr, ptr %arrayidx46, align 8
  %arrayidx.i147 = getelementptr i64, ptr %63, i64 %shr1.i
  %64 = load atomic i64, ptr %arrayidx.i147 monotonic, align 8
  %xor.i149 = xor i64 %64, %mul2.i148
  %sub.i150 = add i64 %xor.i149, -72340172838076673
  %not.i = and i64 %xor.i149, -9187201950435737472
  %and3.i = xor i64 %not.i, -9187201950435737472
  %and4.i = and i64 %and3.i, %sub.i150
  %tobool.not50.i = icmp eq i64 %and4.i, 0
  br i1 %tobool.not50.i, label %for.inc53, label %for.body.lr.ph.i151

for.body.lr.ph.i151:
  %cells.i = getelementptr i8, ptr %arrayidx46, i64 8
  %65 = load ptr, ptr %cells.i, align 8
  %mul5.i = shl i64 %shr1.i, 3
  %generations.i = getelementptr i8, ptr %arrayidx46, i64 24
  %checks.i = getelementptr i8, ptr %arrayidx46, i64 16
  br label %for.body.i152

for.body.i152:
  %matches.051.i = phi i64 [ %and4.i, %for.body.lr.ph.i151 ], [ %and26.i, %for.inc.i ]
  %66 = tail call i64 @llvm.cttz.i64(i64 %matches.051.i, i1 true)
  %div48.i = lshr i64 %66, 3
  %add.i153 = or i64 %div48.i, %mul5.i
  %arrayidx6.i = getelementptr i32, ptr %65, i64 %add.i153
  %67 = load atomic i32, ptr %arrayidx6.i monotonic, align 4
  %conv8.i = zext i32 %67 to i64
  %cmp.not.i = icmp ugt i64 %62, %conv8.i
  br i1 %cmp.not.i, label %if.end.i, label %for.inc.i

if.end.i:
  %68 = load ptr, ptr %generations.i, align 8
  %arrayidx11.i = getelementptr i64, ptr %68, i64 %conv8.i
  %69 = load atomic i64, ptr %arrayidx11.i monotonic, align 8
  %70 = load ptr, ptr %checks.i, align 8
  %arrayidx13.i = getelementptr i64, ptr %70, i64 %conv8.i
  %71 = load atomic i64, ptr %arrayidx13.i monotonic, align 8
  %cmp15.i = icmp sgt i64 %69, -1
  br i1 %cmp15.i, label %land.lhs.true.i, label %for.inc.i

land.lhs.true.i:
  %mul17.i = mul i64 %69, -7046029254386353131
  %xor18.i = xor i64 %mul17.i, %60
  %cmp19.i = icmp eq i64 %xor18.i, %71
  br i1 %cmp19.i, label %cleanup64, label %for.inc.i

for.inc.i:
  %sub25.i = add i64 %matches.051.i, -1
  %and26.i = and i64 %sub25.i, %matches.051.i
  %tobool.not.i154 = icmp eq i64 %and26.i, 0
  br i1 %tobool.not.i154, label %for.inc53, label %for.body.i152

for.inc53:
  %inc54 = add i64 %owner.0181, 1
  %exitcond194.not = icmp eq i64 %inc54, %num_indexes
  br i1 %exitcond194.not, label %for.inc62, label %for.body45

for.inc62:
  %inc63 = add i64 %i.0183, 1
  %cmp24.not = icmp sge i64 %inc63, %count.0.lcssa199205
  %exitcond195 = icmp eq i64 %inc63, %count.0.lcssa199205
  br i1 %exitcond195, label %cleanup64, label %for.body26

cleanup64:
  %cmp24.not169 = phi i1 [ true, %for.cond23.preheader ], [ %cmp24.not184, %land.lhs.true.i ], [ %cmp24.not184, %land.rhs3.i ], [ %cmp24.not, %for.inc62 ], [ %cmp24.not184, %for.body26 ]
  %spec.select = zext i1 %cmp24.not169 to i64
  br label %cleanup68

cleanup68:
  %retval.8 = phi i64 [ 0, %all_differ.exit ], [ 0, %for.end18 ], [ %spec.select, %cleanup64 ], [ 0, %for.end18.thread ], [ 0, %land.lhs.true2 ]
  ret i64 %retval.8
}

declare void @llvm.lifetime.start.p0(i64, ptr)

declare void @llvm.lifetime.end.p0(i64, ptr)

define i64 @begin(ptr %slots, ptr %table, ptr %index, ptr %listed, ptr %rows, ptr %ids, i64 %count, ptr %tags, ptr %tenants, ptr %prompts, i64 %evicted) {
entry:
  %cmp.not96 = icmp sgt i64 %count, 0
  br i1 %cmp.not96, label %for.body.lr.ph, label %for.cond64.preheader.i

for.body.lr.ph:
  %tobool.not = icmp eq ptr %prompts, null
  br label %for.body

for.cond9.preheader:
  br i1 %cmp.not96, label %for.body13.lr.ph, label %for.cond64.preheader.i

for.body13.lr.ph:
  %tobool15.not = icmp eq ptr %index, null
  %cell_of.i = getelementptr i8, ptr %index, i64 40
  %checks.i = getelementptr i8, ptr %index, i64 16
  %generations.i = getelementptr i8, ptr %index, i64 24
  %keyed = getelementptr i8, ptr %slots, i64 32
  %ready = getelementptr i8, ptr %slots, i64 24
  %busy = getelementptr i8, ptr %slots, i64 16
  %users = getelementptr i8, ptr %slots, i64 8
  %tenant = getelementptr i8, ptr %slots, i64 40
  br label %for.body13

for.body:
  %i.098 = phi i64 [ 0, %for.body.lr.ph ], [ %inc, %if.end ]
  %same.097 = phi i64 [ 1, %for.body.lr.ph ], [ %and, %if.end ]
  %last_word = getelementptr %struct.row, ptr %rows, i64 %i.098, i32 1
  %0 = load i32, ptr %last_word, align 1
  %cmp1 = icmp ult i32 %0, 134217728
  br i1 %cmp1, label %cleanup44, label %lor.lhs.false

lor.lhs.false:
  br i1 %tobool.not, label %if.end, label %land.lhs.true

land.lhs.true:
  %arrayidx2 = getelementptr i64, ptr %prompts, i64 %i.098
  %1 = load i64, ptr %arrayidx2, align 8
  %cmp3 = icmp ugt i64 %1, 8191
  br i1 %cmp3, label %cleanup44, label %if.end

if.end:
  %arrayidx4 = getelementptr i64, ptr %tenants, i64 %i.098
  %2 = load i64, ptr %arrayidx4, align 8
  %3 = load i64, ptr %tenants, align 8
  %cmp6 = icmp eq i64 %2, %3
  %and = select i1 %cmp6, i64 %same.097, i64 0
  %inc = add i64 %i.098, 1
  %exitcond.not = icmp eq i64 %inc, %count
  br i1 %exitcond.not, label %for.cond9.preheader, label %for.body

for.cond32.preheader:
  br i1 %cmp.not96, label %for.body36.lr.ph, label %for.cond64.preheader.i

for.body36.lr.ph:
  %num_buckets.i.i = getelementptr i8, ptr %table, i64 40
  %first.i.i = getelementptr i8, ptr %table, i64 32
  %alive.i.i = getelementptr i8, ptr %table, i64 8
  %next.i.i = getelementptr i8, ptr %table, i64 16
  %bucket4.i = getelementptr i8, ptr %table, i64 24
  br label %for.body36

for.body13:
  %i8.0100 = phi i64 [ 0, %for.body13.lr.ph ], [ %inc28, %if.end19 ]
  %arrayidx14 = getelementptr i64, ptr %ids, i64 %i8.0100
  %4 = load i64, ptr %arrayidx14, align 8
  br i1 %tobool15.not, label %if.end19, label %if.then16

if.then16:
  %5 = load ptr, ptr %cell_of.i, align 8
  %arrayidx.i = getelementptr i32, ptr %5, i64 %4
  %6 = load i32, ptr %arrayidx.i, align 4
  %cmp.i = icmp slt i32 %6, 0
  br i1 %cmp.i, label %hide.exit, label %if.end.i

if.end.i:
  %7 = load ptr, ptr %checks.i, align 8
  %arrayidx1.i = getelementptr i64, ptr %7, i64 %4
  store atomic i64 0, ptr %arrayidx1.i monotonic, align 8
  %8 = load ptr, ptr %generations.i, align 8
  %arrayidx2.i = getelementptr i64, ptr %8, i64 %4
  store atomic i64 -1, ptr %arrayidx2.i monotonic, align 8
  %9 = load ptr, ptr %index, align 8
  %idxprom.i = zext i32 %6 to i64
  %arrayidx4.i = getelementptr i8, ptr %9, i64 %idxprom.i
  store atomic i8 0, ptr %arrayidx4.i monotonic, align 1
  %10 = load ptr, ptr %cell_of.i, align 8
  %arrayidx7.i = getelementptr i32, ptr %10, i64 %4
  store i32 -1, ptr %arrayidx7.i, align 4
  br label %hide.exit

hide.exit:
  %arrayidx17 = getelementptr i64, ptr %tags, i64 %i8.0100
  %11 = load i64, ptr %arrayidx17, align 8
  %arrayidx18 = getelementptr i64, ptr %listed, i64 %4
  store i64 %11, ptr %arrayidx18, align 8
  br label %if.end19

if.end19:
  %12 = load ptr, ptr %slots, align 8
  %arrayidx20 = getelementptr i64, ptr %12, i64 %4
  %13 = load i64, ptr %arrayidx20, align 8
  %add = add i64 %13, 1
  store i64 %add, ptr %arrayidx20, align 8
  %14 = load ptr, ptr %keyed, align 8
  %arrayidx21 = getelementptr i8, ptr %14, i64 %4
  store i8 0, ptr %arrayidx21, align 1
  %15 = load ptr, ptr %ready, align 8
  %arrayidx22 = getelementptr i8, ptr %15, i64 %4
  store i8 0, ptr %arrayidx22, align 1
  %16 = load ptr, ptr %busy, align 8
  %arrayidx23 = getelementptr i8, ptr %16, i64 %4
  store i8 1, ptr %arrayidx23, align 1
  %17 = load ptr, ptr %users, align 8
  %arrayidx24 = getelementptr i32, ptr %17, i64 %4
  store i32 1, ptr %arrayidx24, align 4
  %arrayidx25 = getelementptr i64, ptr %tenants, i64 %i8.0100
  %18 = load i64, ptr %arrayidx25, align 8
  %19 = load ptr, ptr %tenant, align 8
  %arrayidx26 = getelementptr i64, ptr %19, i64 %4
  store i64 %18, ptr %arrayidx26, align 8
  %inc28 = add i64 %i8.0100, 1
  %exitcond104.not = icmp eq i64 %inc28, %count
  br i1 %exitcond104.not, label %for.cond32.preheader, label %for.body13

for.cond.cleanup35:
  %num_slots.i = getelementptr i8, ptr %slots, i64 144
  %20 = load i64, ptr %num_slots.i, align 8
  %mul.i = shl i64 %20, 1
  %marks.i = getelementptr i8, ptr %slots, i64 136
  %21 = load ptr, ptr %marks.i, align 8
  br i1 %cmp.not96, label %for.body.lr.ph.i, label %for.cond64.preheader.i

for.body.lr.ph.i:
  %tobool.not.i = icmp eq ptr %prompts, null
  %hash6.i = getelementptr i8, ptr %slots, i64 88
  %depth8.i = getelementptr i8, ptr %slots, i64 96
  %cmp10.i = icmp sgt i64 %evicted, -1
  %past20.i = getelementptr i8, ptr %slots, i64 104
  %past_depth.i = getelementptr i8, ptr %slots, i64 112
  %used_again.i = getelementptr i8, ptr %slots, i64 128
  %again.i = getelementptr i8, ptr %slots, i64 64
  %new.i = getelementptr i8, ptr %slots, i64 120
  br label %for.body.i

for.body.i:
  %i.0146.in.i = phi i64 [ %count, %for.body.lr.ph.i ], [ %i.0146.i, %if.end47.i ]
  %i.0146.i = add i64 %i.0146.in.i, -1
  %arrayidx.i82 = getelementptr i64, ptr %ids, i64 %i.0146.i
  %22 = load i64, ptr %arrayidx.i82, align 8
  br i1 %tobool.not.i, label %cond.end.i, label %cond.true.i

cond.true.i:
  %arrayidx1.i83 = getelementptr i64, ptr %prompts, i64 %i.0146.i
  %23 = load i64, ptr %arrayidx1.i83, align 8
  br label %cond.end.i

cond.end.i:
  %cond.i = phi i64 [ %23, %cond.true.i ], [ 0, %for.body.i ]
  %arrayidx2.i84 = getelementptr %struct.row, ptr %rows, i64 %i.0146.i
  %24 = load i64, ptr %arrayidx2.i84, align 1
  %last_word.i = getelementptr i8, ptr %arrayidx2.i84, i64 32
  %25 = load i32, ptr %last_word.i, align 1
  %and.i = and i32 %25, 16777215
  %conv.i = zext i32 %and.i to i64
  %xor.i = xor i64 %24, %conv.i
  %rem.i = srem i64 %cond.i, 17
  %conv5.i = trunc i64 %rem.i to i8
  %26 = load ptr, ptr %hash6.i, align 8
  %arrayidx7.i85 = getelementptr i64, ptr %26, i64 %22
  store i64 %xor.i, ptr %arrayidx7.i85, align 8
  %27 = load ptr, ptr %depth8.i, align 8
  %arrayidx9.i = getelementptr i8, ptr %27, i64 %22
  store i8 %conv5.i, ptr %arrayidx9.i, align 1
  br i1 %cmp10.i, label %if.then.i, label %if.end39.i

if.then.i:
  %rem12.i = srem i64 %xor.i, %mul.i
  %cmp14.i = icmp slt i64 %rem12.i, 0
  %cond19.i = select i1 %cmp14.i, i64 %mul.i, i64 0
  %add.i = add i64 %cond19.i, %rem12.i
  %28 = load ptr, ptr %past20.i, align 8
  %arrayidx21.i = getelementptr i64, ptr %28, i64 %add.i
  %29 = load i64, ptr %arrayidx21.i, align 8
  %xor24.i = xor i64 %29, %24
  %cmp25.i = icmp ult i64 %xor24.i, 4294967296
  br i1 %cmp25.i, label %land.lhs.true.i, label %if.end39.i

land.lhs.true.i:
  %sub22.i = sub i64 %evicted, %29
  %and23.i = and i64 %sub22.i, 4294967295
  %30 = load i64, ptr %num_slots.i, align 8
  %cmp28.not.i = icmp ugt i64 %and23.i, %30
  br i1 %cmp28.not.i, label %if.end39.i, label %if.then30.i

if.then30.i:
  %arrayidx31.i = getelementptr i8, ptr %21, i64 %cond.i
  store i8 1, ptr %arrayidx31.i, align 1
  %31 = load ptr, ptr %past_depth.i, align 8
  %arrayidx32.i = getelementptr i8, ptr %31, i64 %add.i
  %32 = load i8, ptr %arrayidx32.i, align 1
  %33 = load ptr, ptr %depth8.i, align 8
  %arrayidx34.i = getelementptr i8, ptr %33, i64 %22
  store i8 %32, ptr %arrayidx34.i, align 1
  %34 = load ptr, ptr %used_again.i, align 8
  %35 = load ptr, ptr %past_depth.i, align 8
  %arrayidx36.i = getelementptr i8, ptr %35, i64 %add.i
  %36 = load i8, ptr %arrayidx36.i, align 1
  %idxprom.i87 = zext i8 %36 to i64
  %arrayidx37.i = getelementptr double, ptr %34, i64 %idxprom.i87
  %37 = load double, ptr %arrayidx37.i, align 8
  %add38.i = fadd double %37, 1.000000e+00
  store double %add38.i, ptr %arrayidx37.i, align 8
  br label %if.end39.i

if.end39.i:
  %arrayidx40.i = getelementptr i8, ptr %21, i64 %cond.i
  %38 = load i8, ptr %arrayidx40.i, align 1
  %tobool41.not.i = icmp eq i8 %38, 0
  br i1 %tobool41.not.i, label %if.else.i, label %if.then42.i

if.then42.i:
  %39 = load ptr, ptr %again.i, align 8
  %arrayidx43.i = getelementptr i8, ptr %39, i64 %22
  store i8 1, ptr %arrayidx43.i, align 1
  br label %if.end47.i

if.else.i:
  %40 = load ptr, ptr %new.i, align 8
  %idxprom44.i = and i64 %rem.i, 255
  %arrayidx45.i = getelementptr double, ptr %40, i64 %idxprom44.i
  %41 = load double, ptr %arrayidx45.i, align 8
  %add46.i = fadd double %41, 1.000000e+00
  store double %add46.i, ptr %arrayidx45.i, align 8
  br label %if.end47.i

if.end47.i:
  %cmp.i86 = icmp ugt i64 %i.0146.in.i, 1
  br i1 %cmp.i86, label %for.body.i, label %for.body53.i.preheader

for.body53.i.preheader:
  %xtraiter = and i64 %count, 3
  %42 = icmp ult i64 %count, 4
  br i1 %42, label %for.cond64.preheader.i.loopexit.unr-lcssa, label %for.body53.i.preheader.new

for.body53.i.preheader.new:
  %unroll_iter = and i64 %count, 9223372036854775804
  br label %for.body53.i

for.cond64.preheader.i.loopexit.unr-lcssa:
  %i48.0148.i.unr = phi i64 [ 0, %for.body53.i.preheader ], [ %inc.i.3, %cond.end58.i.3 ]
  %lcmp.mod.not = icmp eq i64 %xtraiter, 0
  br i1 %lcmp.mod.not, label %for.cond64.preheader.i, label %for.body53.i.epil

for.body53.i.epil:
  %i48.0148.i.epil = phi i64 [ %inc.i.epil, %cond.end58.i.epil ], [ %i48.0148.i.unr, %for.cond64.preheader.i.loopexit.unr-lcssa ]
  %epil.iter = phi i64 [ %epil.iter.next, %cond.end58.i.epil ], [ 0, %for.cond64.preheader.i.loopexit.unr-lcssa ]
  br i1 %tobool.not.i, label %cond.end58.i.epil, label %cond.true55.i.epil

cond.true55.i.epil:
  %arrayidx56.i.epil = getelementptr i64, ptr %prompts, i64 %i48.0148.i.epil
  %43 = load i64, ptr %arrayidx56.i.epil, align 8
  br label %cond.end58.i.epil

cond.end58.i.epil:
  %cond59.i.epil = phi i64 [ %43, %cond.true55.i.epil ], [ 0, %for.body53.i.epil ]
  %arrayidx60.i.epil = getelementptr i8, ptr %21, i64 %cond59.i.epil
  store i8 0, ptr %arrayidx60.i.epil, align 1
  %inc.i.epil = add i64 %i48.0148.i.epil, 1
  %epil.iter.next = add i64 %epil.iter, 1
  %epil.iter.cmp.not = icmp eq i64 %epil.iter.next, %xtraiter
  br i1 %epil.iter.cmp.not, label %for.cond64.preheader.i, label %for.body53.i.epil

for.cond64.preheader.i:
  %same.0.lcssa107109114 = phi i64 [ %and, %for.cond.cleanup35 ], [ %and, %for.cond32.preheader ], [ %and, %for.cond9.preheader ], [ 1, %entry ], [ %and, %cond.end58.i.epil ], [ %and, %for.cond64.preheader.i.loopexit.unr-lcssa ]
  %new69.i = getelementptr i8, ptr %slots, i64 120
  %44 = load ptr, ptr %new69.i, align 8
  %45 = load double, ptr %44, align 8
  %add72.i = fadd double %45, 0.000000e+00
  %arrayidx71.1.i = getelementptr i8, ptr %44, i64 8
  %46 = load double, ptr %arrayidx71.1.i, align 8
  %add72.1.i = fadd double %add72.i, %46
  %arrayidx71.2.i = getelementptr i8, ptr %44, i64 16
  %47 = load double, ptr %arrayidx71.2.i, align 8
  %add72.2.i = fadd double %add72.1.i, %47
  %arrayidx71.3.i = getelementptr i8, ptr %44, i64 24
  %48 = load double, ptr %arrayidx71.3.i, align 8
  %add72.3.i = fadd double %add72.2.i, %48
  %arrayidx71.4.i = getelementptr i8, ptr %44, i64 32
  %49 = load double, ptr %arrayidx71.4.i, align 8
  %add72.4.i = fadd double %add72.3.i, %49
  %arrayidx71.5.i = getelementptr i8, ptr %44, i64 40
  %50 = load double, ptr %arrayidx71.5.i, align 8
  %add72.5.i = fadd double %add72.4.i, %50
  %arrayidx71.6.i = getelementptr i8, ptr %44, i64 48
  %51 = load double, ptr %arrayidx71.6.i, align 8
  %add72.6.i = fadd double %add72.5.i, %51
  %arrayidx71.7.i = getelementptr i8, ptr %44, i64 56
  %52 = load double, ptr %arrayidx71.7.i, align 8
  %add72.7.i = fadd double %add72.6.i, %52
  %arrayidx71.8.i = getelementptr i8, ptr %44, i64 64
  %53 = load double, ptr %arrayidx71.8.i, align 8
  %add72.8.i = fadd double %add72.7.i, %53
  %arrayidx71.9.i = getelementptr i8, ptr %44, i64 72
  %54 = load double, ptr %arrayidx71.9.i, align 8
  %add72.9.i = fadd double %add72.8.i, %54
  %arrayidx71.10.i = getelementptr i8, ptr %44, i64 80
  %55 = load double, ptr %arrayidx71.10.i, align 8
  %add72.10.i = fadd double %add72.9.i, %55
  %arrayidx71.11.i = getelementptr i8, ptr %44, i64 88
  %56 = load double, ptr %arrayidx71.11.i, align 8
  %add72.11.i = fadd double %add72.10.i, %56
  %arrayidx71.12.i = getelementptr i8, ptr %44, i64 96
  %57 = load double, ptr %arrayidx71.12.i, align 8
  %add72.12.i = fadd double %add72.11.i, %57
  %arrayidx71.13.i = getelementptr i8, ptr %44, i64 104
  %58 = load double, ptr %arrayidx71.13.i, align 8
  %add72.13.i = fadd double %add72.12.i, %58
  %arrayidx71.14.i = getelementptr i8, ptr %44, i64 112
  %59 = load double, ptr %arrayidx71.14.i, align 8
  %add72.14.i = fadd double %add72.13.i, %59
  %arrayidx71.15.i = getelementptr i8, ptr %44, i64 120
  %60 = load double, ptr %arrayidx71.15.i, align 8
  %add72.15.i = fadd double %add72.14.i, %60
  %arrayidx71.16.i = getelementptr i8, ptr %44, i64 128
  %61 = load double, ptr %arrayidx71.16.i, align 8
  %add72.16.i = fadd double %add72.15.i, %61
  %most_new.i = getelementptr i8, ptr %slots, i64 152
  %62 = load double, ptr %most_new.i, align 8
  %cmp78151.i = fcmp ogt double %add72.16.i, %62
  br i1 %cmp78151.i, label %for.body83.lr.ph.i, label %cleanup44

for.body53.i:
  %i48.0148.i = phi i64 [ 0, %for.body53.i.preheader.new ], [ %inc.i.3, %cond.end58.i.3 ]
  %niter = phi i64 [ 0, %for.body53.i.preheader.new ], [ %niter.next.3, %cond.end58.i.3 ]
  br i1 %tobool.not.i, label %cond.end58.i.1.critedge, label %cond.true55.i

cond.true55.i:
  %arrayidx56.i = getelementptr i64, ptr %prompts, i64 %i48.0148.i
  %63 = load i64, ptr %arrayidx56.i, align 8
  %arrayidx60.i = getelementptr i8, ptr %21, i64 %63
  store i8 0, ptr %arrayidx60.i, align 1
  %inc.i = or i64 %i48.0148.i, 1
  %arrayidx56.i.1 = getelementptr i64, ptr %prompts, i64 %inc.i
  %64 = load i64, ptr %arrayidx56.i.1, align 8
  br label %cond.end58.i.1

cond.end58.i.1.critedge:
  store i8 0, ptr %21, align 1
  br label %cond.end58.i.1

cond.end58.i.1:
  %cond59.i.1 = phi i64 [ %64, %cond.true55.i ], [ 0, %cond.end58.i.1.critedge ]
  %arrayidx60.i.1 = getelementptr i8, ptr %21, i64 %cond59.i.1
  store i8 0, ptr %arrayidx60.i.1, align 1
  br i1 %tobool.not.i, label %cond.end58.i.3.critedge, label %cond.true55.i.2

cond.true55.i.2:
  %inc.i.1 = or i64 %i48.0148.i, 2
  %arrayidx56.i.2 = getelementptr i64, ptr %prompts, i64 %inc.i.1
  %65 = load i64, ptr %arrayidx56.i.2, align 8
  %arrayidx60.i.2 = getelementptr i8, ptr %21, i64 %65
  store i8 0, ptr %arrayidx60.i.2, align 1
  %inc.i.2 = or i64 %i48.0148.i, 3
  %arrayidx56.i.3 = getelementptr i64, ptr %prompts, i64 %inc.i.2
  %66 = load i64, ptr %arrayidx56.i.3, align 8
  br label %cond.end58.i.3

cond.end58.i.3.critedge:
  store i8 0, ptr %21, align 1
  br label %cond.end58.i.3

cond.end58.i.3:
  %cond59.i.3 = phi i64 [ %66, %cond.true55.i.2 ], [ 0, %cond.end58.i.3.critedge ]
  %arrayidx60.i.3 = getelementptr i8, ptr %21, i64 %cond59.i.3
  store i8 0, ptr %arrayidx60.i.3, align 1
  %inc.i.3 = add i64 %i48.0148.i, 4
  %niter.next.3 = add i64 %niter, 4
  %niter.ncmp.3 = icmp eq i64 %niter.next.3, %unroll_iter
  br i1 %niter.ncmp.3, label %for.cond64.preheader.i.loopexit.unr-lcssa, label %for.body53.i

for.body83.lr.ph.i:
  %used_again87.i = getelementptr i8, ptr %slots, i64 128
  br label %for.body83.i

for.body83.i:
  %indvars.iv.i = phi i64 [ 0, %for.body83.lr.ph.i ], [ %indvars.iv.next.i, %for.body83.i ]
  %67 = load ptr, ptr %new69.i, align 8
  %arrayidx86.i = getelementptr double, ptr %67, i64 %indvars.iv.i
  %68 = load double, ptr %arrayidx86.i, align 8
  %div.i = fmul double %68, 5.000000e-01
  store double %div.i, ptr %arrayidx86.i, align 8
  %69 = load ptr, ptr %used_again87.i, align 8
  %arrayidx89.i = getelementptr double, ptr %69, i64 %indvars.iv.i
  %70 = load double, ptr %arrayidx89.i, align 8
  %div90.i = fmul double %70, 5.000000e-01
  store double %div90.i, ptr %arrayidx89.i, align 8
  %indvars.iv.next.i = add i64 %indvars.iv.i, 1
  %71 = load double, ptr %most_new.i, align 8
  %cmp78.i = fcmp ogt double %add72.16.i, %71
  %cmp80.i = icmp ult i64 %indvars.iv.i, 16
  %72 = and i1 %cmp80.i, %cmp78.i
  br i1 %72, label %for.body83.i, label %cleanup44

for.body36:
  %i31.0102 = phi i64 [ 0, %for.body36.lr.ph ], [ %inc41, %name_entry.exit ]
  %arrayidx37 = getelementptr %struct.row, ptr %rows, i64 %i31.0102
  %arrayidx38 = getelementptr i64, ptr %ids, i64 %i31.0102
  %73 = load i64, ptr %arrayidx38, align 8
  %conv39 = trunc i64 %73 to i32
  %last_word.i.i = getelementptr i8, ptr %arrayidx37, i64 32
  %74 = load i32, ptr %last_word.i.i, align 1
  %conv.i.i = zext i32 %74 to i64
  %hash.09.i.i = mul i64 %conv.i.i, -7046029254386353131
  %arrayidx.i.i = getelementptr i8, ptr %arrayidx37, i64 24
  %75 = load i64, ptr %arrayidx.i.i, align 1
  %or.i.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.09.i.i, i64 %hash.09.i.i, i64 29)
  %xor.i.i.i = xor i64 %or.i.i.i, %75
  %hash.0.i.i = mul i64 %xor.i.i.i, -7046029254386353131
  %arrayidx.1.i.i = getelementptr i8, ptr %arrayidx37, i64 16
  %76 = load i64, ptr %arrayidx.1.i.i, align 1
  %or.i.1.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.i.i, i64 %hash.0.i.i, i64 29)
  %xor.i.1.i.i = xor i64 %or.i.1.i.i, %76
  %hash.0.1.i.i = mul i64 %xor.i.1.i.i, -7046029254386353131
  %arrayidx.2.i.i = getelementptr i8, ptr %arrayidx37, i64 8
  %77 = load i64, ptr %arrayidx.2.i.i, align 1
  %or.i.2.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.1.i.i, i64 %hash.0.1.i.i, i64 29)
  %xor.i.2.i.i = xor i64 %or.i.2.i.i, %77
  %hash.0.2.i.i = mul i64 %xor.i.2.i.i, -7046029254386353131
  %78 = load i64, ptr %arrayidx37, align 1
  %or.i.3.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.2.i.i, i64 %hash.0.2.i.i, i64 29)
  %xor.i.3.i.i = xor i64 %or.i.3.i.i, %78
  %hash.0.3.i.i = mul i64 %xor.i.3.i.i, -7046029254386353131
  %shr.i.i = lshr i64 %hash.0.3.i.i, 32
  %79 = load i64, ptr %num_buckets.i.i, align 8
  %mul.i.i = mul i64 %shr.i.i, %79
  %shr3.i.i = lshr i64 %mul.i.i, 32
  %cmp.i88 = icmp ult i32 %74, 16777216
  br i1 %cmp.i88, label %name_entry.exit, label %lor.lhs.false.i

lor.lhs.false.i:
  %80 = load ptr, ptr %first.i.i, align 8
  %arrayidx.i62.i = getelementptr i32, ptr %80, i64 %shr3.i.i
  %entry1.017.i.i = load i32, ptr %arrayidx.i62.i, align 4
  %cmp18.i.i = icmp sgt i32 %entry1.017.i.i, -1
  br i1 %cmp18.i.i, label %land.rhs.lr.ph.i.i, label %if.end.i89

land.rhs.lr.ph.i.i:
  %81 = load ptr, ptr %table, align 8
  br label %land.rhs.i.i

land.rhs.i.i:
  %entry1.019.i.i = phi i32 [ %entry1.017.i.i, %land.rhs.lr.ph.i.i ], [ %entry1.0.i.i, %while.body.i.i ]
  %idxprom.i.i = zext i32 %entry1.019.i.i to i64
  %arrayidx2.i.i = getelementptr %struct.row, ptr %81, i64 %idxprom.i.i
  %last_word.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 32
  %82 = load i32, ptr %last_word.i.i.i, align 1
  %xor.i.i63.i = xor i32 %82, %74
  %conv.i.i.i = zext i32 %xor.i.i63.i to i64
  %83 = load i64, ptr %arrayidx2.i.i, align 1
  %xor6.i.i.i = xor i64 %83, %78
  %or.i.i64.i = or i64 %xor6.i.i.i, %conv.i.i.i
  %arrayidx.1.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 8
  %84 = load i64, ptr %arrayidx.1.i.i.i, align 1
  %xor6.1.i.i.i = xor i64 %84, %77
  %or.1.i.i.i = or i64 %or.i.i64.i, %xor6.1.i.i.i
  %arrayidx.2.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 16
  %85 = load i64, ptr %arrayidx.2.i.i.i, align 1
  %xor6.2.i.i.i = xor i64 %85, %76
  %or.2.i.i.i = or i64 %or.1.i.i.i, %xor6.2.i.i.i
  %arrayidx.3.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 24
  %86 = load i64, ptr %arrayidx.3.i.i.i, align 1
  %xor6.3.i.i.i = xor i64 %86, %75
  %or.3.i.i.i = or i64 %or.2.i.i.i, %xor6.3.i.i.i
  %cmp7.i.not.i.i = icmp eq i64 %or.3.i.i.i, 0
  br i1 %cmp7.i.not.i.i, label %land.rhs3.i.i, label %while.body.i.i

land.rhs3.i.i:
  %87 = load ptr, ptr %alive.i.i, align 8
  %arrayidx5.i.i = getelementptr i8, ptr %87, i64 %idxprom.i.i
  %88 = load i8, ptr %arrayidx5.i.i, align 1
  %tobool6.not.i.i = icmp eq i8 %88, 0
  br i1 %tobool6.not.i.i, label %while.body.i.i, label %name_entry.exit

while.body.i.i:
  %89 = load ptr, ptr %next.i.i, align 8
  %arrayidx9.i.i = getelementptr i32, ptr %89, i64 %idxprom.i.i
  %entry1.0.i.i = load i32, ptr %arrayidx9.i.i, align 4
  %cmp.i.i = icmp sgt i32 %entry1.0.i.i, -1
  br i1 %cmp.i.i, label %land.rhs.i.i, label %if.end.i89

if.end.i89:
  %90 = load ptr, ptr %bucket4.i, align 8
  %sext = shl i64 %73, 32
  %idxprom.i90 = ashr exact i64 %sext, 32
  %arrayidx.i91 = getelementptr i32, ptr %90, i64 %idxprom.i90
  %91 = load i32, ptr %arrayidx.i91, align 4
  %cmp5.i = icmp sgt i32 %91, -1
  br i1 %cmp5.i, label %if.then6.i, label %if.end18.i

if.then6.i:
  %idxprom10.i = zext i32 %91 to i64
  %arrayidx11.i = getelementptr i32, ptr %80, i64 %idxprom10.i
  %92 = load i32, ptr %arrayidx11.i, align 4
  %cmp12.not67.i = icmp eq i32 %92, %conv39
  %.pre.i = load ptr, ptr %next.i.i, align 8
  br i1 %cmp12.not67.i, label %while.end.i, label %while.body.i

while.body.i:
  %93 = phi i32 [ %94, %while.body.i ], [ %92, %if.then6.i ]
  %idxprom13.i = sext i32 %93 to i64
  %arrayidx14.i = getelementptr i32, ptr %.pre.i, i64 %idxprom13.i
  %94 = load i32, ptr %arrayidx14.i, align 4
  %cmp12.not.i = icmp eq i32 %94, %conv39
  br i1 %cmp12.not.i, label %while.end.i.loopexit, label %while.body.i

while.end.i.loopexit:
  %arrayidx14.i.le = getelementptr i32, ptr %.pre.i, i64 %idxprom13.i
  br label %while.end.i

while.end.i:
  %link.0.lcssa.i = phi ptr [ %arrayidx11.i, %if.then6.i ], [ %arrayidx14.i.le, %while.end.i.loopexit ]
  %arrayidx17.i = getelementptr i32, ptr %.pre.i, i64 %idxprom.i90
  %95 = load i32, ptr %arrayidx17.i, align 4
  store i32 %95, ptr %link.0.lcssa.i, align 4
  br label %if.end18.i

if.end18.i:
  %96 = load ptr, ptr %table, align 8
  %arrayidx20.i = getelementptr %struct.row, ptr %96, i64 %idxprom.i90
  tail call void @llvm.memcpy.p0.p0.i64(ptr align 1 %arrayidx20.i, ptr align 1 %arrayidx37, i64 36, i1 false)
  %97 = load ptr, ptr %alive.i.i, align 8
  %arrayidx22.i = getelementptr i8, ptr %97, i64 %idxprom.i90
  store i8 1, ptr %arrayidx22.i, align 1
  %conv.i92 = trunc i64 %shr3.i.i to i32
  %98 = load ptr, ptr %bucket4.i, align 8
  %arrayidx25.i = getelementptr i32, ptr %98, i64 %idxprom.i90
  store i32 %conv.i92, ptr %arrayidx25.i, align 4
  %99 = load ptr, ptr %first.i.i, align 8
  %arrayidx27.i = getelementptr i32, ptr %99, i64 %shr3.i.i
  %100 = load i32, ptr %arrayidx27.i, align 4
  %101 = load ptr, ptr %next.i.i, align 8
  %arrayidx30.i = getelementptr i32, ptr %101, i64 %idxprom.i90
  store i32 %100, ptr %arrayidx30.i, align 4
  %102 = load ptr, ptr %first.i.i, align 8
  %arrayidx32.i93 = getelementptr i32, ptr %102, i64 %shr3.i.i
  store i32 %conv39, ptr %arrayidx32.i93, align 4
  br label %name_entry.exit

name_entry.exit:
  %inc41 = add i64 %i31.0102, 1
  %exitcond105.not = icmp eq i64 %inc41, %count
  br i1 %exitcond105.not, label %for.cond.cleanup35, label %for.body36

cleanup44:
  %retval.1 = phi i64 [ %same.0.lcssa107109114, %for.cond64.preheader.i ], [ %same.0.lcssa107109114, %for.body83.i ], [ -1, %for.body ], [ -1, %land.lhs.true ]
  ret i64 %retval.1
}

define i64 @filled(ptr %slots, ptr %index, ptr %listed, ptr %ids, i64 %count) {
entry:
  %cmp69 = icmp sgt i64 %count, 0
  br i1 %cmp69, label %for.body.lr.ph, label %for.cond.cleanup18

for.body.lr.ph:
  %busy = getelementptr i8, ptr %slots, i64 16
  %ready = getelementptr i8, ptr %slots, i64 24
  %users = getelementptr i8, ptr %slots, i64 8
  %tobool.not = icmp eq ptr %index, null
  %keyed = getelementptr i8, ptr %slots, i64 32
  %cell_of.i = getelementptr i8, ptr %index, i64 40
  %checks.i = getelementptr i8, ptr %index, i64 16
  %generations.i = getelementptr i8, ptr %index, i64 24
  br label %for.body

for.cond14.preheader:
  %tobool15 = icmp ne ptr %index, null
  %0 = and i1 %tobool15, %cmp69
  br i1 %0, label %for.body19.lr.ph, label %for.cond.cleanup18

for.body19.lr.ph:
  %keyed20 = getelementptr i8, ptr %slots, i64 32
  %num_slots.i = getelementptr i8, ptr %index, i64 32
  %generations.i65 = getelementptr i8, ptr %index, i64 24
  %checks.i66 = getelementptr i8, ptr %index, i64 16
  %cells.i = getelementptr i8, ptr %index, i64 8
  %cell_of.i68 = getelementptr i8, ptr %index, i64 40
  br label %for.body19

for.body:
  %i.071 = phi i64 [ 0, %for.body.lr.ph ], [ %inc, %for.inc ]
  %unheld.070 = phi i64 [ 0, %for.body.lr.ph ], [ %add, %for.inc ]
  %1 = load ptr, ptr %busy, align 8
  %arrayidx = getelementptr i64, ptr %ids, i64 %i.071
  %2 = load i64, ptr %arrayidx, align 8
  %arrayidx1 = getelementptr i8, ptr %1, i64 %2
  store i8 0, ptr %arrayidx1, align 1
  %3 = load ptr, ptr %ready, align 8
  %4 = load i64, ptr %arrayidx, align 8
  %arrayidx3 = getelementptr i8, ptr %3, i64 %4
  store i8 1, ptr %arrayidx3, align 1
  %5 = load ptr, ptr %users, align 8
  %6 = load i64, ptr %arrayidx, align 8
  %arrayidx5 = getelementptr i32, ptr %5, i64 %6
  %7 = load i32, ptr %arrayidx5, align 4
  %cmp6 = icmp eq i32 %7, 0
  %conv7 = zext i1 %cmp6 to i64
  %add = add i64 %unheld.070, %conv7
  br i1 %tobool.not, label %for.inc, label %land.lhs.true

land.lhs.true:
  %8 = load ptr, ptr %keyed, align 8
  %arrayidx9 = getelementptr i8, ptr %8, i64 %6
  %9 = load i8, ptr %arrayidx9, align 1
  %tobool11.not = icmp eq i8 %9, 0
  br i1 %tobool11.not, label %for.inc, label %if.then

if.then:
  %10 = load ptr, ptr %cell_of.i, align 8
  %arrayidx.i = getelementptr i32, ptr %10, i64 %6
  %11 = load i32, ptr %arrayidx.i, align 4
  %cmp.i = icmp slt i32 %11, 0
  br i1 %cmp.i, label %for.inc, label %if.end.i

if.end.i:
  %12 = load ptr, ptr %checks.i, align 8
  %arrayidx1.i = getelementptr i64, ptr %12, i64 %6
  store atomic i64 0, ptr %arrayidx1.i monotonic, align 8
  %13 = load ptr, ptr %generations.i, align 8
  %arrayidx2.i = getelementptr i64, ptr %13, i64 %6
  store atomic i64 -1, ptr %arrayidx2.i monotonic, align 8
  %14 = load ptr, ptr %index, align 8
  %idxprom.i = zext i32 %11 to i64
  %arrayidx4.i = getelementptr i8, ptr %14, i64 %idxprom.i
  store atomic i8 0, ptr %arrayidx4.i monotonic, align 1
  %15 = load ptr, ptr %cell_of.i, align 8
  %arrayidx7.i = getelementptr i32, ptr %15, i64 %6
  store i32 -1, ptr %arrayidx7.i, align 4
  br label %for.inc

for.inc:
  %inc = add i64 %i.071, 1
  %exitcond.not = icmp eq i64 %inc, %count
  br i1 %exitcond.not, label %for.cond14.preheader, label %for.body

for.cond.cleanup18:
  %unheld.0.lcssa76 = phi i64 [ %add, %for.cond14.preheader ], [ 0, %entry ], [ %add, %for.inc31 ]
  ret i64 %unheld.0.lcssa76

for.body19:
  %i13.073 = phi i64 [ 0, %for.body19.lr.ph ], [ %inc32, %for.inc31 ]
  %16 = load ptr, ptr %keyed20, align 8
  %arrayidx21 = getelementptr i64, ptr %ids, i64 %i13.073
  %17 = load i64, ptr %arrayidx21, align 8
  %arrayidx22 = getelementptr i8, ptr %16, i64 %17
  %18 = load i8, ptr %arrayidx22, align 1
  %tobool23.not = icmp eq i8 %18, 0
  br i1 %tobool23.not, label %for.inc31, label %if.then24

if.then24:
  %arrayidx26 = getelementptr i64, ptr %listed, i64 %17
  %19 = load i64, ptr %arrayidx26, align 8
  %shr.i = lshr i64 %19, 32
  %20 = load i64, ptr %num_slots.i, align 8
  %mul.i = mul i64 %20, %shr.i
  %shr1.i = lshr i64 %mul.i, 32
  %21 = load ptr, ptr %index, align 8
  %arrayidx.i63 = getelementptr i64, ptr %21, i64 %shr1.i
  %22 = load i64, ptr %arrayidx.i63, align 8
  %sub.i = add i64 %22, -72340172838076673
  %not.i = and i64 %22, -9187201950435737472
  %and.i = xor i64 %not.i, -9187201950435737472
  %and2.i = and i64 %and.i, %sub.i
  %tobool.not.i = icmp eq i64 %and2.i, 0
  br i1 %tobool.not.i, label %for.inc31, label %if.end.i64

if.end.i64:
  %23 = load ptr, ptr %slots, align 8
  %arrayidx29 = getelementptr i64, ptr %23, i64 %17
  %24 = load i64, ptr %arrayidx29, align 8
  %mul3.i = shl i64 %shr1.i, 3
  %25 = tail call i64 @llvm.cttz.i64(i64 %and2.i, i1 true)
  %div38.i = lshr i64 %25, 3
  %add.i = or i64 %div38.i, %mul3.i
  %conv4.i = trunc i64 %add.i to i32
  %26 = load ptr, ptr %generations.i65, align 8
  %arrayidx5.i = getelementptr i64, ptr %26, i64 %17
  store atomic i64 %24, ptr %arrayidx5.i monotonic, align 8
  %27 = load ptr, ptr %checks.i66, align 8
  %arrayidx6.i = getelementptr i64, ptr %27, i64 %17
  %mul8.i = mul i64 %24, -7046029254386353131
  %xor.i = xor i64 %mul8.i, %19
  store atomic i64 %xor.i, ptr %arrayidx6.i monotonic, align 8
  %28 = load ptr, ptr %cells.i, align 8
  %sext.i = shl i64 %add.i, 32
  %idxprom.i67 = ashr exact i64 %sext.i, 32
  %arrayidx9.i = getelementptr i32, ptr %28, i64 %idxprom.i67
  %conv11.i = trunc i64 %17 to i32
  store atomic i32 %conv11.i, ptr %arrayidx9.i monotonic, align 4
  %29 = load ptr, ptr %index, align 8
  %arrayidx14.i = getelementptr i8, ptr %29, i64 %idxprom.i67
  %30 = trunc i64 %19 to i8
  %conv17.i = or i8 %30, -128
  store atomic i8 %conv17.i, ptr %arrayidx14.i monotonic, align 1
  %31 = load ptr, ptr %cell_of.i68, align 8
  %arrayidx18.i = getelementptr i32, ptr %31, i64 %17
  store i32 %conv4.i, ptr %arrayidx18.i, align 4
  br label %for.inc31

for.inc31:
  %inc32 = add i64 %i13.073, 1
  %cmp16 = icmp slt i64 %inc32, %count
  br i1 %cmp16, label %for.body19, label %for.cond.cleanup18
}

define i64 @privilege(ptr %slots, ptr %ids, ptr %grants, i64 %num_grants) {
entry:
  %add.ptr = getelementptr %struct.grant, ptr %grants, i64 %num_grants
  %cmp50 = icmp sgt i64 %num_grants, 0
  br i1 %cmp50, label %for.body.lr.ph, label %for.cond.cleanup

for.body.lr.ph:
  %privileged9 = getelementptr i8, ptr %slots, i64 48
  %favoured = getelementptr i8, ptr %slots, i64 72
  %pinned = getelementptr i8, ptr %slots, i64 80
  %pinned_until = getelementptr i8, ptr %slots, i64 56
  br label %for.body

for.cond.cleanup:
  %privileged.0.lcssa = phi i64 [ 0, %entry ], [ %add, %for.cond.cleanup7 ]
  ret i64 %privileged.0.lcssa

for.body:
  %grant.052 = phi ptr [ %grants, %for.body.lr.ph ], [ %incdec.ptr23, %for.cond.cleanup7 ]
  %privileged.051 = phi i64 [ 0, %for.body.lr.ph ], [ %add, %for.cond.cleanup7 ]
  %count = getelementptr i8, ptr %grant.052, i64 8
  %0 = load i64, ptr %count, align 8
  %cmp648 = icmp sgt i64 %0, 0
  br i1 %cmp648, label %for.body8.lr.ph, label %for.cond.cleanup7

for.body8.lr.ph:
  %1 = load i64, ptr %grant.052, align 8
  %add.ptr1 = getelementptr i64, ptr %ids, i64 %1
  %favours = getelementptr i8, ptr %grant.052, i64 16
  %pin_until = getelementptr i8, ptr %grant.052, i64 24
  br label %for.body8

for.cond.cleanup7:
  %.lcssa = phi i64 [ %0, %for.body ], [ %16, %for.inc ]
  %add = add i64 %.lcssa, %privileged.051
  %incdec.ptr23 = getelementptr i8, ptr %grant.052, i64 32
  %cmp = icmp ult ptr %incdec.ptr23, %add.ptr
  br i1 %cmp, label %for.body, label %for.cond.cleanup

for.body8:
  %id.049 = phi ptr [ %add.ptr1, %for.body8.lr.ph ], [ %incdec.ptr, %for.inc ]
  %2 = load ptr, ptr %privileged9, align 8
  %3 = load i64, ptr %id.049, align 8
  %arrayidx = getelementptr i8, ptr %2, i64 %3
  store i8 1, ptr %arrayidx, align 1
  %4 = load i64, ptr %favours, align 8
  %cmp10 = icmp ne i64 %4, 0
  %conv11 = zext i1 %cmp10 to i8
  %5 = load ptr, ptr %favoured, align 8
  %6 = load i64, ptr %id.049, align 8
  %arrayidx12 = getelementptr i8, ptr %5, i64 %6
  store i8 %conv11, ptr %arrayidx12, align 1
  %7 = load double, ptr %pin_until, align 8
  %cmp13 = fcmp oge double %7, 0.000000e+00
  %conv15 = zext i1 %cmp13 to i8
  %8 = load ptr, ptr %pinned, align 8
  %9 = load i64, ptr %id.049, align 8
  %arrayidx16 = getelementptr i8, ptr %8, i64 %9
  store i8 %conv15, ptr %arrayidx16, align 1
  %10 = load ptr, ptr %pinned, align 8
  %11 = load i64, ptr %id.049, align 8
  %arrayidx18 = getelementptr i8, ptr %10, i64 %11
  %12 = load i8, ptr %arrayidx18, align 1
  %tobool.not = icmp eq i8 %12, 0
  br i1 %tobool.not, label %for.inc, label %if.then

if.then:
  %13 = load double, ptr %pin_until, align 8
  %14 = load ptr, ptr %pinned_until, align 8
  %arrayidx20 = getelementptr double, ptr %14, i64 %11
  store double %13, ptr %arrayidx20, align 8
  br label %for.inc

for.inc:
  %incdec.ptr = getelementptr i8, ptr %id.049, i64 8
  %15 = load i64, ptr %grant.052, align 8
  %add.ptr4 = getelementptr i64, ptr %ids, i64 %15
  %16 = load i64, ptr %count, align 8
  %add.ptr5 = getelementptr i64, ptr %add.ptr4, i64 %16
  %cmp6 = icmp ult ptr %incdec.ptr, %add.ptr5
  br i1 %cmp6, label %for.body8, label %for.cond.cleanup7
}

define i64 @let_go(ptr %slots, ptr %ids, i64 %count, ptr %by_kind, ptr %counts) {
entry:
  %ends = alloca [4 x i64], align 16
  store i64 0, ptr %counts, align 8
  %arrayidx.1 = getelementptr i8, ptr %counts, i64 8
  store i64 0, ptr %arrayidx.1, align 8
  %arrayidx.2 = getelementptr i8, ptr %counts, i64 16
  store i64 0, ptr %arrayidx.2, align 8
  %arrayidx.3 = getelementptr i8, ptr %counts, i64 24
  store i64 0, ptr %arrayidx.3, align 8
  %cmp2102 = icmp sgt i64 %count, 0
  br i1 %cmp2102, label %for.body4.lr.ph, label %lor.lhs.false

for.body4.lr.ph:
  %users = getelementptr i8, ptr %slots, i64 8
  %ready = getelementptr i8, ptr %slots, i64 24
  %keyed = getelementptr i8, ptr %slots, i64 32
  %busy = getelementptr i8, ptr %slots, i64 16
  %pinned.i = getelementptr i8, ptr %slots, i64 80
  %favoured.i = getelementptr i8, ptr %slots, i64 72
  %again.i = getelementptr i8, ptr %slots, i64 64
  br label %for.body4

for.cond.cleanup3:
  %0 = icmp eq i64 %13, 0
  br i1 %0, label %cleanup, label %lor.lhs.false

for.body4:
  %i.0104 = phi i64 [ 0, %for.body4.lr.ph ], [ %inc21, %kind_of.exit ]
  %cached.0103 = phi i64 [ 1, %for.body4.lr.ph ], [ %13, %kind_of.exit ]
  %arrayidx5 = getelementptr i64, ptr %ids, i64 %i.0104
  %1 = load i64, ptr %arrayidx5, align 8
  %2 = load ptr, ptr %users, align 8
  %arrayidx6 = getelementptr i32, ptr %2, i64 %1
  %3 = load i32, ptr %arrayidx6, align 4
  %sub = add i32 %3, -1
  store i32 %sub, ptr %arrayidx6, align 4
  %4 = load ptr, ptr %users, align 8
  %arrayidx8 = getelementptr i32, ptr %4, i64 %1
  %5 = load i32, ptr %arrayidx8, align 4
  %cmp9 = icmp eq i32 %5, 0
  br i1 %cmp9, label %land.lhs.true, label %land.end.thread

land.lhs.true:
  %6 = load ptr, ptr %ready, align 8
  %arrayidx10 = getelementptr i8, ptr %6, i64 %1
  %7 = load i8, ptr %arrayidx10, align 1
  %tobool.not = icmp eq i8 %7, 0
  br i1 %tobool.not, label %land.end.thread, label %land.lhs.true11

land.lhs.true11:
  %8 = load ptr, ptr %keyed, align 8
  %arrayidx12 = getelementptr i8, ptr %8, i64 %1
  %9 = load i8, ptr %arrayidx12, align 1
  %tobool14.not = icmp eq i8 %9, 0
  br i1 %tobool14.not, label %land.end.thread, label %land.end

land.end:
  %10 = load ptr, ptr %busy, align 8
  %arrayidx15 = getelementptr i8, ptr %10, i64 %1
  %11 = load i8, ptr %arrayidx15, align 1
  %.fr = freeze i8 %11
  %tobool16.not = icmp eq i8 %.fr, 0
  %12 = and i64 %cached.0103, 1
  %spec.select = select i1 %tobool16.not, i64 %12, i64 0
  br label %land.end.thread

land.end.thread:
  %13 = phi i64 [ 0, %land.lhs.true11 ], [ 0, %land.lhs.true ], [ 0, %for.body4 ], [ %spec.select, %land.end ]
  %14 = load ptr, ptr %pinned.i, align 8
  %arrayidx.i = getelementptr i8, ptr %14, i64 %1
  %15 = load i8, ptr %arrayidx.i, align 1
  %tobool.not.i = icmp eq i8 %15, 0
  br i1 %tobool.not.i, label %if.end.i, label %kind_of.exit

if.end.i:
  %16 = load ptr, ptr %favoured.i, align 8
  %arrayidx1.i = getelementptr i8, ptr %16, i64 %1
  %17 = load i8, ptr %arrayidx1.i, align 1
  %tobool2.not.i = icmp eq i8 %17, 0
  br i1 %tobool2.not.i, label %cond.false.i, label %kind_of.exit

cond.false.i:
  %18 = load ptr, ptr %again.i, align 8
  %arrayidx3.i = getelementptr i8, ptr %18, i64 %1
  %19 = load i8, ptr %arrayidx3.i, align 1
  %conv4.i = zext i8 %19 to i64
  br label %kind_of.exit

kind_of.exit:
  %retval.0.i = phi i64 [ 3, %land.end.thread ], [ %conv4.i, %cond.false.i ], [ 2, %if.end.i ]
  %arrayidx19 = getelementptr i64, ptr %counts, i64 %retval.0.i
  %20 = load i64, ptr %arrayidx19, align 8
  %add = add i64 %20, 1
  store i64 %add, ptr %arrayidx19, align 8
  %inc21 = add i64 %i.0104, 1
  %exitcond.not = icmp eq i64 %inc21, %count
  br i1 %exitcond.not, label %for.cond.cleanup3, label %for.body4

lor.lhs.false:
  %21 = load i64, ptr %counts, align 8
  %cmp25 = icmp eq i64 %21, %count
  br i1 %cmp25, label %cleanup, label %if.end

if.end:
  call void @llvm.lifetime.start.p0(i64 32, ptr %ends)
  store i64 0, ptr %ends, align 16
  %arrayidx34.1 = getelementptr i8, ptr %ends, i64 8
  store i64 %21, ptr %arrayidx34.1, align 8
  %22 = load i64, ptr %arrayidx.1, align 8
  %add39.1 = add i64 %22, %21
  %arrayidx34.2 = getelementptr i8, ptr %ends, i64 16
  store i64 %add39.1, ptr %arrayidx34.2, align 16
  %23 = load i64, ptr %arrayidx.2, align 8
  %add39.2 = add i64 %23, %add39.1
  %arrayidx34.3 = getelementptr i8, ptr %ends, i64 24
  store i64 %add39.2, ptr %arrayidx34.3, align 8
  br i1 %cmp2102, label %for.body46.lr.ph, label %for.cond.cleanup45

for.body46.lr.ph:
  %pinned.i87 = getelementptr i8, ptr %slots, i64 80
  %favoured.i92 = getelementptr i8, ptr %slots, i64 72
  %again.i96 = getelementptr i8, ptr %slots, i64 64
  br label %for.body46

for.cond.cleanup45:
  call void @llvm.lifetime.end.p0(i64 32, ptr %ends)
  br label %cleanup

for.body46:
  %i41.0108 = phi i64 [ 0, %for.body46.lr.ph ], [ %inc55, %kind_of.exit99 ]
  %arrayidx47 = getelementptr i64, ptr %ids, i64 %i41.0108
  %24 = load i64, ptr %arrayidx47, align 8
  %25 = load ptr, ptr %pinned.i87, align 8
  %arrayidx.i88 = getelementptr i8, ptr %25, i64 %24
  %26 = load i8, ptr %arrayidx.i88, align 1
  %tobool.not.i89 = icmp eq i8 %26, 0
  br i1 %tobool.not.i89, label %if.end.i91, label %kind_of.exit99

if.end.i91:
  %27 = load ptr, ptr %favoured.i92, align 8
  %arrayidx1.i93 = getelementptr i8, ptr %27, i64 %24
  %28 = load i8, ptr %arrayidx1.i93, align 1
  %tobool2.not.i94 = icmp eq i8 %28, 0
  br i1 %tobool2.not.i94, label %cond.false.i95, label %kind_of.exit99

cond.false.i95:
  %29 = load ptr, ptr %again.i96, align 8
  %arrayidx3.i97 = getelementptr i8, ptr %29, i64 %24
  %30 = load i8, ptr %arrayidx3.i97, align 1
  %conv4.i98 = zext i8 %30 to i64
  br label %kind_of.exit99

kind_of.exit99:
  %retval.0.i90 = phi i64 [ 3, %for.body46 ], [ %conv4.i98, %cond.false.i95 ], [ 2, %if.end.i91 ]
  %arrayidx51 = getelementptr [4 x i64], ptr %ends, i64 0, i64 %retval.0.i90
  %31 = load i64, ptr %arrayidx51, align 8
  %inc52 = add i64 %31, 1
  store i64 %inc52, ptr %arrayidx51, align 8
  %arrayidx53 = getelementptr i64, ptr %by_kind, i64 %31
  store i64 %24, ptr %arrayidx53, align 8
  %inc55 = add i64 %i41.0108, 1
  %exitcond112.not = icmp eq i64 %inc55, %count
  br i1 %exitcond112.not, label %for.cond.cleanup45, label %for.body46

cleanup:
  %retval.0 = phi i64 [ 2, %for.cond.cleanup45 ], [ 1, %lor.lhs.false ], [ 0, %for.cond.cleanup3 ]
  ret i64 %retval.0
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

declare i64 @llvm.cttz.i64(i64, i1)

declare i64 @llvm.fshl.i64(i64, i64, i64)
