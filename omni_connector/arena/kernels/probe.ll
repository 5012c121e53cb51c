; clang 19, sha256 of the C d06563c80c400d5f
; scripts/compile_kernels.py has made this file.

%struct.index = type { ptr, ptr, ptr, ptr, i64 }

define i64 @probe(ptr %indexes, i64 %num_indexes, ptr %tags, i64 %num_tags, ptr %owners, ptr %slots, ptr %generations) {
entry:
  %cmp.not42 = icmp sgt i64 %num_tags, 0
  br i1 %cmp.not42, label %while.cond.preheader.lr.ph, label %cleanup10

while.cond.preheader.lr.ph:
  %cmp138 = icmp sgt i64 %num_indexes, 0
  br label %while.cond.preheader

while.cond.preheader:
  %i.044 = phi i64 [ 0, %while.cond.preheader.lr.ph ], [ %inc9, %for.inc ]
  %owner.043 = phi i64 [ 0, %while.cond.preheader.lr.ph ], [ %owner.137, %for.inc ]
  br i1 %cmp138, label %land.rhs.lr.ph, label %while.end

land.rhs.lr.ph:
  %arrayidx2 = getelementptr i64, ptr %tags, i64 %i.044
  %0 = load i64, ptr %arrayidx2, align 8
  %shr.i = lshr i64 %0, 32
  %and.i = and i64 %0, 127
  %1 = mul i64 %and.i, 72340172838076673
  %mul2.i = add i64 %1, -9187201950435737472
  br label %land.rhs

land.rhs:
  %asked.040 = phi i64 [ 0, %land.rhs.lr.ph ], [ %inc, %while.body ]
  %owner.139 = phi i64 [ %owner.043, %land.rhs.lr.ph ], [ %cond, %while.body ]
  %arrayidx = getelementptr %struct.index, ptr %indexes, i64 %owner.139
  %num_slots.i = getelementptr i8, ptr %arrayidx, i64 32
  %2 = load i64, ptr %num_slots.i, align 8
  %mul.i = mul i64 %2, %shr.i
  %shr1.i = lshr i64 %mul.i, 32
  %3 = load ptr, ptr %arrayidx, align 8
  %arrayidx.i = getelementptr i64, ptr %3, i64 %shr1.i
  %4 = load atomic i64, ptr %arrayidx.i monotonic, align 8
  %xor.i = xor i64 %4, %mul2.i
  %sub.i = add i64 %xor.i, -72340172838076673
  %not.i = and i64 %xor.i, -9187201950435737472
  %and3.i = xor i64 %not.i, -9187201950435737472
  %and4.i = and i64 %and3.i, %sub.i
  %tobool.not50.i = icmp eq i64 %and4.i, 0
  br i1 %tobool.not50.i, label %while.body, label %for.body.lr.ph.i

for.body.lr.ph.i:
  %cells.i = getelementptr i8, ptr %arrayidx, i64 8
  %5 = load ptr, ptr %cells.i, align 8
  %mul5.i = shl i64 %shr1.i, 3
  %generations.i = getelementptr i8, ptr %arrayidx, i64 24
  %checks.i = getelementptr i8, ptr %arrayidx, i64 16
  br label %for.body.i

for.body.i:
  %matches.051.i = phi i64 [ %and4.i, %for.body.lr.ph.i ], [ %and26.i, %for.inc.i ]
  %6 = tail call i64 @llvm.cttz.i64(i64 %matches.051.i, i1 true)
  %div48.i = lshr i64 %6, 3
  %add.i = or i64 %div48.i, %mul5.i
  %arrayidx6.i = getelementptr i32, ptr %5, i64 %add.i
  %7 = load atomic i32, ptr %arrayidx6.i monotonic, align 4
  %conv8.i = zext i32 %7 to i64
  %cmp.not.i = icmp ugt i64 %2, %conv8.i
  br i1 %cmp.not.i, label %if.end.i, label %for.inc.i

if.end.i:
  %8 = load ptr, ptr %generations.i, align 8
  %arrayidx11.i = getelementptr i64, ptr %8, i64 %conv8.i
  %9 = load atomic i64, ptr %arrayidx11.i monotonic, align 8
  %10 = load ptr, ptr %checks.i, align 8
  %arrayidx13.i = getelementptr i64, ptr %10, i64 %conv8.i
  %11 = load atomic i64, ptr %arrayidx13.i monotonic, align 8
  %cmp15.i = icmp sgt i64 %9, -1
  br i1 %cmp15.i, label %land.lhs.true.i, label %for.inc.i

land.lhs.true.i:
  %mul17.i = mul i64 %9, -7046029254386353131
  %xor18.i = xor i64 %mul17.i, %0
  %cmp19.i = icmp eq i64 %xor18.i, %11
  br i1 %cmp19.i, label %find.exit, label %for.inc.i

for.inc.i:
  %sub25.i = add i64 %matches.051.i, -1
  %and26.i = and i64 %sub25.i, %matches.051.i
  %tobool.not.i = icmp eq i64 %and26.i, 0
  br i1 %tobool.not.i, label %while.body, label %for.body.i

find.exit:
  %arrayidx3.le = getelementptr i64, ptr %slots, i64 %i.044
  %arrayidx4.le = getelementptr i64, ptr %generations, i64 %i.044
  store i64 %conv8.i, ptr %arrayidx3.le, align 8
  store i64 %9, ptr %arrayidx4.le, align 8
  br label %while.end

while.body:
  %inc = add i64 %asked.040, 1
  %add = add i64 %owner.139, 1
  %cmp5 = icmp slt i64 %add, %num_indexes
  %cond = select i1 %cmp5, i64 %add, i64 0
  %exitcond.not = icmp eq i64 %inc, %num_indexes
  br i1 %exitcond.not, label %cleanup10, label %land.rhs

while.end:
  %owner.137 = phi i64 [ %owner.139, %find.exit ], [ %owner.043, %while.cond.preheader ]
  %asked.035 = phi i64 [ %asked.040, %find.exit ], [ 0, %while.cond.preheader ]
  %cmp7.not = icmp eq i64 %asked.035, %num_indexes
  br i1 %cmp7.not, label %cleanup10, label %for.inc

for.inc:
  %arrayidx8 = getelementptr i64, ptr %owners, i64 %i.044
  store i64 %owner.137, ptr %arrayidx8, align 8
  %inc9 = add i64 %i.044, 1
  %exitcond50.not = icmp eq i64 %inc9, %num_tags
  br i1 %exitcond50.not, label %cleanup10, label %while.cond.preheader

cleanup10:
  %i.0.lcssa = phi i64 [ 0, %entry ], [ %i.044, %while.body ], [ %i.044, %while.end ], [ %num_tags, %for.inc ]
  %spec.select = tail call i64 @llvm.smin.i64(i64 %i.0.lcssa, i64 %num_tags)
  ret i64 %spec.select
}

define void @probe_each(ptr %indexes, i64 %num_indexes, ptr %tags, i64 %num_tags, ptr %owners, ptr %slots, ptr %generations) {
entry:
  %cmp30 = icmp sgt i64 %num_tags, 0
  br i1 %cmp30, label %for.body.lr.ph, label %for.cond.cleanup

for.body.lr.ph:
  %cmp228 = icmp sgt i64 %num_indexes, 0
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %i.031 = phi i64 [ 0, %for.body.lr.ph ], [ %inc9, %while.end ]
  %arrayidx = getelementptr i64, ptr %generations, i64 %i.031
  store i64 -1, ptr %arrayidx, align 8
  %arrayidx1 = getelementptr i64, ptr %slots, i64 %i.031
  store i64 -1, ptr %arrayidx1, align 8
  br i1 %cmp228, label %land.rhs.lr.ph, label %while.end

land.rhs.lr.ph:
  %arrayidx4 = getelementptr i64, ptr %tags, i64 %i.031
  %0 = load i64, ptr %arrayidx4, align 8
  %shr.i = lshr i64 %0, 32
  %and.i = and i64 %0, 127
  %1 = mul i64 %and.i, 72340172838076673
  %mul2.i = add i64 %1, -9187201950435737472
  br label %land.rhs

land.rhs:
  %owner.029 = phi i64 [ 0, %land.rhs.lr.ph ], [ %inc, %while.body ]
  %arrayidx3 = getelementptr %struct.index, ptr %indexes, i64 %owner.029
  %num_slots.i = getelementptr i8, ptr %arrayidx3, i64 32
  %2 = load i64, ptr %num_slots.i, align 8
  %mul.i = mul i64 %2, %shr.i
  %shr1.i = lshr i64 %mul.i, 32
  %3 = load ptr, ptr %arrayidx3, align 8
  %arrayidx.i = getelementptr i64, ptr %3, i64 %shr1.i
  %4 = load atomic i64, ptr %arrayidx.i monotonic, align 8
  %xor.i = xor i64 %4, %mul2.i
  %sub.i = add i64 %xor.i, -72340172838076673
  %not.i = and i64 %xor.i, -9187201950435737472
  %and3.i = xor i64 %not.i, -9187201950435737472
  %and4.i = and i64 %and3.i, %sub.i
  %tobool.not50.i = icmp eq i64 %and4.i, 0
  br i1 %tobool.not50.i, label %while.body, label %for.body.lr.ph.i

for.body.lr.ph.i:
  %cells.i = getelementptr i8, ptr %arrayidx3, i64 8
  %5 = load ptr, ptr %cells.i, align 8
  %mul5.i = shl i64 %shr1.i, 3
  %generations.i = getelementptr i8, ptr %arrayidx3, i64 24
  %checks.i = getelementptr i8, ptr %arrayidx3, i64 16
  br label %for.body.i

for.body.i:
  %matches.051.i = phi i64 [ %and4.i, %for.body.lr.ph.i ], [ %and26.i, %for.inc.i ]
  %6 = tail call i64 @llvm.cttz.i64(i64 %matches.051.i, i1 true)
  %div48.i = lshr i64 %6, 3
  %add.i = or i64 %div48.i, %mul5.i
  %arrayidx6.i = getelementptr i32, ptr %5, i64 %add.i
  %7 = load atomic i32, ptr %arrayidx6.i monotonic, align 4
  %conv8.i = zext i32 %7 to i64
  %cmp.not.i = icmp ugt i64 %2, %conv8.i
  br i1 %cmp.not.i, label %if.end.i, label %for.inc.i

if.end.i:
  %8 = load ptr, ptr %generations.i, align 8
  %arrayidx11.i = getelementptr i64, ptr %8, i64 %conv8.i
  %9 = load atomic i64, ptr %arrayidx11.i monotonic, align 8
  %10 = load ptr, ptr %checks.i, align 8
  %arrayidx13.i = getelementptr i64, ptr %10, i64 %conv8.i
  %11 = load atomic i64, ptr %arrayidx13.i monotonic, align 8
  %cmp15.i = icmp sgt i64 %9, -1
  br i1 %cmp15.i, label %land.lhs.true.i, label %for.inc.i

land.lhs.true.i:
  %mul17.i = mul i64 %9, -7046029254386353131
  %xor18.i = xor i64 %mul17.i, %0
  %cmp19.i = icmp eq i64 %xor18.i, %11
  br i1 %cmp19.i, label %find.exit, label %for.inc.i

for.inc.i:
  %sub25.i = add i64 %matches.051.i, -1
  %and26.i = and i64 %sub25.i, %matches.051.i
  %tobool.not.i = icmp eq i64 %and26.i, 0
  br i1 %tobool.not.i, label %while.body, label %for.body.i

find.exit:
  store i64 %conv8.i, ptr %arrayidx1, align 8
  store i64 %9, ptr %arrayidx, align 8
  br label %while.end

while.body:
  %inc = add i64 %owner.029, 1
  %exitcond.not = icmp eq i64 %inc, %num_indexes
  br i1 %exitcond.not, label %while.end, label %land.rhs

while.end:
  %cond = phi i64 [ %owner.029, %find.exit ], [ -1, %for.body ], [ -1, %while.body ]
  %arrayidx8 = getelementptr i64, ptr %owners, i64 %i.031
  store i64 %cond, ptr %arrayidx8, align 8
  %inc9 = add i64 %i.031, 1
  %exitcond35.not = icmp eq i64 %inc9, %num_tags
  br i1 %exitcond35.not, label %for.cond.cleanup, label %for.body
}

define i64 @change(ptr %index, ptr %tags, ptr %slots, ptr %generations, i64 %count) {
entry:
  %cmp49 = icmp sgt i64 %count, 0
  br i1 %cmp49, label %for.body.lr.ph, label %return

for.body.lr.ph:
  %num_slots = getelementptr i8, ptr %index, i64 32
  %0 = load i64, ptr %num_slots, align 8
  br label %for.body

for.cond:
  %inc = add i64 %i.050, 1
  %exitcond.not = icmp eq i64 %inc, %count
  br i1 %exitcond.not, label %for.cond3.preheader, label %for.body

for.cond3.preheader:
  br i1 %cmp49, label %for.body6.lr.ph, label %return

for.body6.lr.ph:
  %cell_of.i = getelementptr i8, ptr %index, i64 40
  %checks.i = getelementptr i8, ptr %index, i64 16
  %generations.i = getelementptr i8, ptr %index, i64 24
  br label %for.body6

for.body:
  %i.050 = phi i64 [ 0, %for.body.lr.ph ], [ %inc, %for.cond ]
  %arrayidx = getelementptr i64, ptr %slots, i64 %i.050
  %1 = load i64, ptr %arrayidx, align 8
  %cmp1.not = icmp ult i64 %1, %0
  br i1 %cmp1.not, label %for.cond, label %return

for.cond13.preheader:
  %tobool = icmp ne ptr %tags, null
  %2 = and i1 %tobool, %cmp49
  br i1 %2, label %for.body16.lr.ph, label %return

for.body16.lr.ph:
  %num_slots.i = getelementptr i8, ptr %index, i64 32
  %generations.i41 = getelementptr i8, ptr %index, i64 24
  %checks.i42 = getelementptr i8, ptr %index, i64 16
  %cells.i = getelementptr i8, ptr %index, i64 8
  %cell_of.i44 = getelementptr i8, ptr %index, i64 40
  br label %for.body16

for.body6:
  %i2.052 = phi i64 [ 0, %for.body6.lr.ph ], [ %inc9, %hide.exit ]
  %arrayidx7 = getelementptr i64, ptr %slots, i64 %i2.052
  %3 = load i64, ptr %arrayidx7, align 8
  %4 = load ptr, ptr %cell_of.i, align 8
  %arrayidx.i = getelementptr i32, ptr %4, i64 %3
  %5 = load i32, ptr %arrayidx.i, align 4
  %cmp.i = icmp slt i32 %5, 0
  br i1 %cmp.i, label %hide.exit, label %if.end.i

if.end.i:
  %6 = load ptr, ptr %checks.i, align 8
  %arrayidx1.i = getelementptr i64, ptr %6, i64 %3
  store atomic i64 0, ptr %arrayidx1.i monotonic, align 8
  %7 = load ptr, ptr %generations.i, align 8
  %arrayidx2.i = getelementptr i64, ptr %7, i64 %3
  store atomic i64 -1, ptr %arrayidx2.i monotonic, align 8
  %8 = load ptr, ptr %index, align 8
  %idxprom.i = zext i32 %5 to i64
  %arrayidx4.i = getelementptr i8, ptr %8, i64 %idxprom.i
  store atomic i8 0, ptr %arrayidx4.i monotonic, align 1
  %9 = load ptr, ptr %cell_of.i, align 8
  %arrayidx7.i = getelementptr i32, ptr %9, i64 %3
  store i32 -1, ptr %arrayidx7.i, align 4
  br label %hide.exit

hide.exit:
  %inc9 = add i64 %i2.052, 1
  %exitcond56.not = icmp eq i64 %inc9, %count
  br i1 %exitcond56.not, label %for.cond13.preheader, label %for.body6

for.body16:
  %i12.054 = phi i64 [ 0, %for.body16.lr.ph ], [ %inc21, %show.exit ]
  %arrayidx17 = getelementptr i64, ptr %tags, i64 %i12.054
  %10 = load i64, ptr %arrayidx17, align 8
  %shr.i = lshr i64 %10, 32
  %11 = load i64, ptr %num_slots.i, align 8
  %mul.i = mul i64 %11, %shr.i
  %shr1.i = lshr i64 %mul.i, 32
  %12 = load ptr, ptr %index, align 8
  %arrayidx.i39 = getelementptr i64, ptr %12, i64 %shr1.i
  %13 = load i64, ptr %arrayidx.i39, align 8
  %sub.i = add i64 %13, -72340172838076673
  %not.i = and i64 %13, -9187201950435737472
  %and.i = xor i64 %not.i, -9187201950435737472
  %and2.i = and i64 %and.i, %sub.i
  %tobool.not.i = icmp eq i64 %and2.i, 0
  br i1 %tobool.not.i, label %show.exit, label %if.end.i40

if.end.i40:
  %arrayidx19 = getelementptr i64, ptr %generations, i64 %i12.054
  %14 = load i64, ptr %arrayidx19, align 8
  %arrayidx18 = getelementptr i64, ptr %slots, i64 %i12.054
  %15 = load i64, ptr %arrayidx18, align 8
  %mul3.i = shl i64 %shr1.i, 3
  %16 = tail call i64 @llvm.cttz.i64(i64 %and2.i, i1 true)
  %div38.i = lshr i64 %16, 3
  %add.i = or i64 %div38.i, %mul3.i
  %conv4.i = trunc i64 %add.i to i32
  %17 = load ptr, ptr %generations.i41, align 8
  %arrayidx5.i = getelementptr i64, ptr %17, i64 %15
  store atomic i64 %14, ptr %arrayidx5.i monotonic, align 8
  %18 = load ptr, ptr %checks.i42, align 8
  %arrayidx6.i = getelementptr i64, ptr %18, i64 %15
  %mul8.i = mul i64 %14, -7046029254386353131
  %xor.i = xor i64 %mul8.i, %10
  store atomic i64 %xor.i, ptr %arrayidx6.i monotonic, align 8
  %19 = load ptr, ptr %cells.i, align 8
  %sext.i = shl i64 %add.i, 32
  %idxprom.i43 = ashr exact i64 %sext.i, 32
  %arrayidx9.i = getelementptr i32, ptr %19, i64 %idxprom.i43
  %conv11.i = trunc i64 %15 to i32
  store atomic i32 %conv11.i, ptr %arrayidx9.i monotonic, align 4
  %20 = load ptr, ptr %index, align 8
  %arrayidx14.i = getelementptr i8, ptr %20, i64 %idxprom.i43
  %21 = trunc i64 %10 to i8
  %conv17.i = or i8 %21, -128
  store atomic i8 %conv17.i, ptr %arrayidx14.i monotonic, align 1
  %22 = load ptr, ptr %cell_of.i44, align 8
  %arrayidx18.i = getelementptr i32, ptr %22, i64 %15
  store i32 %conv4.i, ptr %arrayidx18.i, align 4
  br label %show.exit

show.exit:
  %inc21 = add i64 %i12.054, 1
  %cmp14 = icmp slt i64 %inc21, %count
  br i1 %cmp14, label %for.body16, label %return

return:
  %retval.1 = phi i64 [ 1, %for.cond13.preheader ], [ 1, %for.cond3.preheader ], [ 1, %entry ], [ 1, %show.exit ], [ 0, %for.body ]
  ret i64 %retval.1
}

define void @tag(ptr %hashes, i64 %hash_bytes, i64 %count, i64 %seed, ptr %tags) {
entry:
  %cmp4 = icmp sgt i64 %count, 0
  br i1 %cmp4, label %for.body.preheader, label %for.cond.cleanup

for.body.preheader:
  %xtraiter = and i64 %count, 1
  %0 = icmp eq i64 %count, 1
  br i1 %0, label %for.cond.cleanup.loopexit.unr-lcssa, label %for.body.preheader.new

for.body.preheader.new:
  %unroll_iter = and i64 %count, 9223372036854775806
  br label %for.body

for.cond.cleanup.loopexit.unr-lcssa:
  %i.05.unr = phi i64 [ 0, %for.body.preheader ], [ %inc.1, %for.body ]
  %lcmp.mod.not = icmp eq i64 %xtraiter, 0
  br i1 %lcmp.mod.not, label %for.cond.cleanup, label %for.body.epil

for.body.epil:
  %mul.epil = mul i64 %i.05.unr, %hash_bytes
  %add.ptr.epil = getelementptr i8, ptr %hashes, i64 %mul.epil
  %word.0.copyload.i.epil = load i64, ptr %add.ptr.epil, align 1
  %xor.i.epil = xor i64 %word.0.copyload.i.epil, %seed
  %mul.i.epil = mul i64 %xor.i.epil, -2960836687051489901
  %shr.i.epil = lshr i64 %mul.i.epil, 32
  %xor1.i.epil = xor i64 %shr.i.epil, %mul.i.epil
  %mul2.i.epil = mul i64 %xor1.i.epil, -2960836687051489901
  %tobool.not.i.epil = icmp eq i64 %word.0.copyload.i.epil, %seed
  %cond.i.epil = select i1 %tobool.not.i.epil, i64 1, i64 %mul2.i.epil
  %arrayidx.epil = getelementptr i64, ptr %tags, i64 %i.05.unr
  store i64 %cond.i.epil, ptr %arrayidx.epil, align 8
  br label %for.cond.cleanup

for.cond.cleanup:
  ret void

for.body:
  %i.05 = phi i64 [ 0, %for.body.preheader.new ], [ %inc.1, %for.body ]
  %niter = phi i64 [ 0, %for.body.preheader.new ], [ %niter.next.1, %for.body ]
  %mul = mul i64 %i.05, %hash_bytes
  %add.ptr = getelementptr i8, ptr %hashes, i64 %mul
  %word.0.copyload.i = load i64, ptr %add.ptr, align 1
  %xor.i = xor i64 %word.0.copyload.i, %seed
  %mul.i = mul i64 %xor.i, -2960836687051489901
  %shr.i = lshr i64 %mul.i, 32
  %xor1.i = xor i64 %shr.i, %mul.i
  %mul2.i = mul i64 %xor1.i, -2960836687051489901
  %tobool.not.i = icmp eq i64 %word.0.copyload.i, %seed
  %cond.i = select i1 %tobool.not.i, i64 1, i64 %mul2.i
  %arrayidx = getelementptr i64, ptr %tags, i64 %i.05
  store i64 %cond.i, ptr %arrayidx, align 8
  %inc = or i64 %i.05, 1
  %mul.1 = mul i64 %inc, %hash_bytes
  %add.ptr.1 = getelementptr i8, ptr %hashes, i64 %mul.1
  %word.0.copyload.i.1 = load i64, ptr %add.ptr.1, align 1
  %xor.i.1 = xor i64 %word.0.copyload.i.1, %seed
  %mul.i.1 = mul i64 %xor.i.1, -2960836687051489901
  %shr.i.1 = lshr i64 %mul.i.1, 32
  %xor1.i.1 = xor i64 %shr.i.1, %mul.i.1
  %mul2.i.1 = mul i64 %xor1.i.1, -2960836687051489901
  %tobool.not.i.1 = icmp eq i64 %word.0.copyload.i.1, %seed
  %cond.i.1 = select i1 %tobool.not.i.1, i64 1, i64 %mul2.i.1
  %arrayidx.1 = getelementptr i64, ptr %tags, i64 %inc
  store i64 %cond.i.1, ptr %arrayidx.1, align 8
  %inc.1 = add i64 %i.05, 2
  %niter.next.1 = add i64 %niter, 2
  %niter.ncmp.1 = icmp eq i64 %niter.next.1, %unroll_iter
  br i1 %niter.ncmp.1, label %for.cond.cleanup.loopexit.unr-lcssa, label %for.body
}

declare i64 @llvm.cttz.i64(i64, i1)

declare i64 @llvm.smin.i64(i64, i64)
